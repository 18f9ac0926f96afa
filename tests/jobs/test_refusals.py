"""Bad input ends every command with exit code 2 and one line that says what is wrong, before
anything is written."""

import shlex
from pathlib import Path

import pytest

from jobs.cli import app
from specdec_core.recordings.find import FINISHED
from specdec_core.servers.table import SERVERS
from tests.commands import assert_refused, config_file, prompts_file, server_plan
from tests.own_server import OwnServer
from tests.specdec_core.kinds import chain
from tests.specdec_core.training.conftest import recorded_answers
from tests.word_server import WordServer

DRAFTERS = {
    "alone": None,
    "chain": chain(max_tokens=3),
    "svip": chain("svip", threshold=1.5),
    "other": {"kind": "draft_model", "draft": "x"},
    "tree": {"kind": "tree"},
    "lossy": {"kind": "target_tree", "branching": [2, 1]},
    "headed": chain("specdecpp", head="gone", threshold=0.5),
    "pearl": {"kind": "pearl"},
}
FILES = {
    "rows.yaml": "rows: []",
    "lossy_rows.yaml": "rows: [{drafter: {kind: target_tree, branching: [2, 1]}}]",
    "unknown.yaml": "search: [{drafter: {kind: draft_model, policy: {kind: svip, thresold: 1}}}]",
    "typo.yaml": "configuration: {drafter: {kind: draft_model, polcy: {}}}",
    "pair.yaml": "pair: {}",
    "gpu.yaml": "pair: {runner: {device: gpu}}",
    "date.yaml": "name: 2024-13-01",
    "twice.yaml": "trials: 3\ntrials: 4",
    "deep.yaml": "[" * 3000,
    "search.yaml": "search: [{drafter: {kind: suffix}}]",
    "bare.yaml": "drafter: {kind: suffix}",
    "tiny.yaml": "configuration: {drafter: {kind: draft_model, draft: tiny}}",
    "draftless.yaml": "{pair: {target: x}, configuration: {drafter: {kind: draft_model}}}",
    "broken.jsonl": '{"prompt": "def"}\n{"prompt": \n',
    "old/sweep.json": '{"name": "x", "colour": 1}',
    "placement.yaml": "draft: {devices: 0}",
    "spilt.yaml": "target: {devices: 2, spilt: heads}",
    "thirds.yaml": "target: {devices: 3}",
    "ahead.yaml": "search: [{drafter: {kind: pearl}}]",
    "recipe.yaml": "sharpnes: 3",
    "far.yaml": "{device: far away, target: 0.1, drafts: {'*': 0.001}}",
}
BENCH = "--config chain.yaml --rows rows.yaml --max-new-tokens 6 --prompts sums.jsonl"
SERVE = f"bench serve {BENCH}"
OFFLINE = f"bench offline {BENCH} --peers none"
DRAFT, EAGLE = "train draft --out out --recording", "train eagle --out out --recording"
HEAD = "train head --recording"
CERTIFY, NOWHERE = "certify --config chain.yaml", "http://127.0.0.1:9"
SERVED, PLACED = "serve --config chain.yaml", "--cluster placement.yaml"
METRICS = Path(__file__).parents[1] / "data" / "vllm-0.32-metrics.txt"
OWN, WORDS = "sweep --config sweep.yaml --engine own", f"{SERVED} --engine words"

LONG = "x" * 300  # more than a file's name may have

ROWS = [
    ("report nowhere", "nowhere"),
    (f"report {LONG}", f"{LONG}/sweep.json: file name too long"),
    (f"generate x --target {LONG}", f"{LONG}/config.json: file name too long"),
    (f"generate x --config {LONG}", f"{LONG}: file name too long"),
    (f"train head --recording {LONG}", f"{LONG}: file name too long"),
    ("report .", r"no sweep in it \(no sweep\.json\)"),
    ("report old", "colour: unknown key"),
    ("demo smollm3", "error: smollm3: unknown; expected one of bundled, smollm2\n"),
    ("sweep --config unknown.yaml", "thresold: unknown key"),
    ("sweep --prompts broken.jsonl", "broken.jsonl:2"),
    ("sweep --config none.yaml", "none.yaml: no such file"),
    ("sweep --config pair.yaml/none.yaml", "pair.yaml/none.yaml: not a directory"),
    ("sweep --config date.yaml", "date.yaml: not valid YAML: month must be in 1..12"),
    ("sweep --config twice.yaml", "twice.yaml: not valid YAML: the key 'trials' is there twice"),
    ("sweep --config deep.yaml", "deep.yaml: not valid YAML: maximum recursion depth"),
    ("sweep --config gpu.yaml", r"pair\.runner\.device: .*cuda.* \(got 'gpu'\)"),
    ("sweep --target ./nowhere", "./nowhere: no such folder"),
    ("sweep --target bundled:huge", "'huge'; known: target, draft-medium, draft-small, smollm"),
    ("sweep --chat-template always", "bundled:held_out: chat template always: the tokenizer has"),
    ("sweep --max-length 2", r"pair\.runner\.max_length: .* \(got 2\)"),
    ("sweep --trials -3", r"trials: .* \(got -3\)"),
    ("sweep --draft =x", "expected [name=]model"),
    ("sweep --draft a/b=x", r"pair\.drafts: 'a/b' names a draft: expected a folder's name"),
    ("record --draft ..=x", r"pair: drafts: '\.\.' names a draft: expected a folder's name"),
    ("profile --draft target=x", "pair: drafts: a draft cannot be called target"),
    ("profile --draft suffix=x", "pair: drafts: a draft cannot be called suffix"),
    ("sweep --traces nowhere", "nowhere: no such folder, and no recording of that name"),
    ("sweep --traces x --no-replay", "give one"),
    ("sweep --config sweep.yaml --cluster thirds.yaml", "split evenly among 3 devices"),
    ("sweep --config ahead.yaml", "--cluster"),
    (f"sweep --config ahead.yaml {PLACED}", "a placement that has one for the draft"),
    (
        "sweep --config ahead.yaml --cluster thirds.yaml --profile far.yaml",
        "no other machine's profile",
    ),
    ("sweep --engine none", "--engine none: expected one of "),
    ("sweep --engine sglang", "--engine sglang: it has no server that this library starts"),
    ("sweep --profile x.json", "x.json: no such file"),
    (f"{OWN} --clients 8", "fewer than the 8 clients"),
    (f"{OWN} --clients 2,2", "a number of clients is given twice"),
    (f"{OWN} --no-replay", "--no-replay: not with --engine"),
    (f"{OWN} --draft x=./nowhere", "./nowhere: no such folder"),
    ("record --from-vllm x.txt --prompts sums.jsonl", "--prompts: not with --from-vllm"),
    ("record --from-vllm x.txt --server-model x", "--server-model: not with --from-vllm"),
    ("record --from-vllm x.txt --no-continuations", "--no-continuations: not with --from-vllm"),
    ("record --from-vllm x.txt --draft small", "--draft needs --profile"),
    (f"record --from-vllm {METRICS} --from-vllm {METRICS}", "two files of servers with the same"),
    (
        "record --from-vllm x.txt --profile far.yaml --draft a --draft b",
        "--draft: give one with --from-vllm",
    ),
    ("record --name ''", "--name : expected a folder's name, not a path"),
    ("record --mixing 1.5", r"recording: mixing: .* \(got 1\.5\)"),
    ("record --max-length 40", r"prompt stdlib/.* the 40 that the pair holds \(runner\.max_length"),
    ("record --chat-template always", "bundled:train: chat template always: the tokenizer has"),
    ("record --chat-template chatml.jinja", "chatml.jinja: no such file; a chat template is"),
    ("record --clients 4", "--server-model and --clients go with --server"),
    (f"record --server {NOWHERE}", f"{NOWHERE}: does not answer: "),
    ("generate x --config chain.yaml --target .", "leave out --target"),
    ("generate '' --config chain.yaml", "error: the prompt is empty"),
    ("generate x --config chain.yaml --max-new-tokens 1000", "256"),
    ("generate x --config chain.yaml --max-new-tokens 30 --max-length 24", "24"),
    (f"generate x --config pearl.yaml {PLACED}", "a placement that has one for the draft"),
    ("generate x --config pearl.yaml --cluster spilt.yaml", r"spilt\.yaml: target\.spilt"),
    ("profile --widths ''", "--widths .*expected positive numbers as 1,2,4"),
    ("profile --widths 1,x", "--widths 1,x: expected positive numbers as 1,2,4"),
    ("profile --config sweep.yaml --widths 1 --contexts 64 --max-length 64", "context.*64"),
    ("profile --engine sglang", "--engine sglang: this library does not time its steps"),
    (f"profile {PLACED} --engine vllm", "--cluster has the devices of this library's engine"),
    (f"profile {PLACED} --draft bundled:smollm2-eagle", "an EAGLE head reads what the target has"),
    ("profile --out old", "--out old: a folder; expected a file"),
    ("serve keys old", "old: cannot be read as a file of keys: is a directory"),
    ("serve keys rows.yaml", "rows.yaml:1: expected the SHA-256 of a key"),
    ("serve keys latin.txt", "latin.txt: cannot be read as a file of keys: not UTF-8 text"),
    ("serve keys keys --name 'a\u2028b'", "--name: one line, please"),
    ("capacity --slo ttft=1", "give --rate or --trace, to find how many replicas it needs"),
    ("capacity --slo fast --rate 1", "--slo fast: expected limits in seconds"),
    ("capacity --slo ttft=1 --rate 0", "--rate 0: expected requests a second"),
    ("capacity --slo ttft=1 --rate 1 --share 2", "--share 2: expected a share"),
    (f"{CERTIFY} --against {NOWHERE}", "--against needs --server"),
    (f"{CERTIFY} --dtype float32", "--dtype needs --engine or --server"),
    (f"{CERTIFY} --engine vllm --server {NOWHERE}", "give it or --server"),
    (f"{CERTIFY} --engine vllm --server-model x", "--server-model needs --server"),
    (f"{CERTIFY} --engine sglang", "starts; possible: llama_cpp, vllm"),
    (f"{CERTIFY} --server {NOWHERE} --against {NOWHERE}/v1", "this is --server"),
    (
        f"{CERTIFY} --server {NOWHERE} --limit 1 --max-new-tokens 8",
        f"{NOWHERE}: does not answer",
    ),
    ("certify --config pearl.yaml --quick --prompts sums.jsonl", "say which, with --cluster"),
    (f"{OFFLINE} --peers llama.cpp", "--peers llama.cpp: expected one of vllm"),
    (f"{OFFLINE} --max-new-tokens 900", "more than the 256 that the pair holds"),
    (f"{OFFLINE} --dtype int8", "pair.runner.target_dtype: "),
    (f"{OFFLINE} --only EAGLE-9", "--only EAGLE-9: no name contains it"),
    (f"{OFFLINE} --rows lossy_rows.yaml", "is lossy"),
    (f"{OFFLINE} --config headed.yaml", "no head gone.*`specdec train head` makes one"),
    (f"{SERVE} --clients 0", "--clients 0: expected positive numbers as 1,2,4"),
    (f"{SERVE} --clients 4,4", "--clients: a number of clients is given twice"),
    (f"{SERVE} --requests 4", "--clients or --rate says the load"),
    (
        f"{SERVE} --rate 20 --requests 4 --slots 2 --only nothing",
        "--only nothing: no server's name contains",
    ),
    (f"{SERVE} --rate 0", "--rate 0: expected requests a second as 2,4.5"),
    (f"{SERVE} --rate 2,2", "--rate: a rate is given twice"),
    (f"{SERVE} --clients 1 --seed 1", "--seed needs --rate"),
    (f"{SERVE} --rate 2 --requests 4", "6 prompts, but 2 requests/s need 20"),
    (f"{SERVE} --clients 1 --peers transformers", "--peers transformers: it has no server"),
    (f"{SERVE} --clients 1 --threads 999", "runner.threads 999: this process may use"),
    (f"{SERVE} --clients 8 --requests 4", "4 requests are fewer than the 8 clients"),
    (f"{SERVE} --clients 4 --requests 4", "6 prompts, but 4 clients need 8"),
    (f"{SERVE} --clients 1 --requests 4 --peers vllm", "make bench-peers"),
    ("serve", "no champion.*`specdec sweep` finds one"),
    ("serve --config none.yaml", "none.yaml: no such file"),
    ("serve --config typo.yaml", "typo.yaml: .*polcy"),
    ("serve --config pair.yaml", "pair.yaml: configuration: Field required"),
    ("serve --config search.yaml", "search.yaml: a sweep file, which `specdec sweep` takes"),
    ("serve --config bare.yaml", "bare.yaml: expected `pair:` and `configuration:`"),
    (
        "serve --config tiny.yaml",
        "tiny.yaml: configuration: the pair has no draft 'tiny' (it has: medium, small)",
    ),
    ("serve --config pearl.yaml", "say which, with --cluster"),
    (f"{SERVED} --host 0.0.0.0", "give --api-key-file, or --no-auth"),
    (f"{SERVED} --host no.such.host.invalid --no-auth", "cannot listen on no.such.host.invalid:"),
    (f"{SERVED} --api-key-file none", "none: no such file"),
    (f"{SERVED} --tls-cert none --tls-key none", "--tls-cert none: cannot be read"),
    (f"{SERVED} --cores 0,4096", "--cores 4096: the cores are 0 to"),
    (f"{SERVED} --cores 0 --replicas 2", "not the same number for each of 2 replicas"),
    (f"{SERVED} --engine sglang", "it has no server that this library starts"),
    (f"{SERVED} --engine-arguments --enable-lora", "--engine-arguments needs --engine"),
    (f'{WORDS} --engine-arguments "\'"', "--engine-arguments: no closing"),
    (f"{WORDS} --engine-arguments --api_key=a", "--engine-arguments: --api_key: only this server"),
    (f"{WORDS} --engine-arguments '--port 9'", "--engine-arguments: --port: only this server asks"),
    (f"{WORDS} --fresh", "--fresh needs this"),
    (f"{WORDS} --no-share-prefixes", "--no-share-prefixes needs this"),
    ("serve --config draftless.yaml", "draftless.yaml: .*a draft model, and the pair has none"),
    ("deploy --promote 46718f --canary 10%", "--canary: not with --promote"),
    ("deploy --back --canary 10%", "--canary: not with --back"),
    ("deploy --back --uncertified", "--uncertified: not with --back"),
    (f"deploy --promote 46718f --url {NOWHERE}", "--url: not with --promote"),
    ("deploy challenger --version 3", "challenger: not with --version"),
    ("deploy foo --config chain.yaml", "foo: not with --config"),
    ("deploy challenger --back", "challenger: not with --back"),
    ("export --config chain.yaml --to tgi", "expected one of vllm"),
    ("export --config other.yaml --to vllm", "the pair has no draft 'x' (it has: draft)"),
    ("export --config chain.yaml --to vllm --version 0.9", "the settings of 0.32 are known"),
    ("export --config lossy.yaml --to vllm", "is lossy"),
    ("export --config chain.yaml --to sglang --plugin", "--to sglang: there is no plug-in of this"),
    ("export --config tree.yaml --to vllm --plugin", "drafts trees"),
    ("export --config svip.yaml --to vllm", "no recording of"),
    (
        "export --config chain.yaml --to vllm --fastest",
        "--fastest is found by replay, and no recording of",
    ),
    ("export --config chain.yaml --to vllm --fastest --plugin", "--plugin and --fastest: "),
    ("export --config chain.yaml --to vllm --traces some --plugin", "--plugin and --traces: "),
    ("export --config svip.yaml --to vllm --traces none", "none: "),
    (f"{DRAFT} answers/0 --set width=100", "width 100 is no even multiple of 6 heads"),
    (f"{DRAFT} answers/0 --set key_value_heads=4", "6 heads cannot share 4 keys"),
    (f"{DRAFT} answers/0 --set copied_layers=first", "copied_layers: "),
    (
        f"{DRAFT} answers/0 --set copied_layers=[0,1] --set width=96 --set inner=8",
        "width, inner: a draft of copied layers",
    ),
    (f"{DRAFT} nowhere", "nowhere: no such folder, and no recording of that name"),
    (f"{EAGLE} answers/0 --out rows.yaml", "rows.yaml: cannot be written, not a directory"),
    (f"{EAGLE} answers/0 --set steps", "--set steps: expected name=value"),
    (f"{EAGLE} answers/0 --set steps=0", "steps: .*greater than or equal to 1"),
    (f"{EAGLE} nowhere", "nowhere: no such folder, and no recording of that name"),
    (f"{EAGLE} warm/0", "warm/0: no answers at temperature 0 or 1, by which an EAGLE head is"),
    *(
        (
            f"{EAGLE} answers/0 --layers {layers}",
            f"--layers {layers}: expected increasing numbers from 0 to 2",
        )
        for layers in ("1,1,2", "0,1,3", "99")
    ),
    (f"{HEAD} nowhere", "nowhere: no such folder, and no recording of that name"),
    (f"{HEAD} begun/0", "begun/0: not finished; the same `specdec record` goes on"),
    (f"{HEAD} answers/0", "recorded without a draft"),
    (f"{HEAD} answers/0 --kinds specdecpp,t9", "kind: .*t9"),
    (f"{HEAD} answers/0 --depths 1,deep", "--depths 1,deep: expected numbers"),
    (f"{HEAD} answers/0 --w-rej 0", "w_rej: .*greater than 0"),
    ("lab bundled-pair --smoke --config recipe.yaml", "recipe.yaml: .*sharpnes"),
    ("lab bandits --traces x --prompts y", "replays its own prompts"),
    ("lab bandits --traces x --slots 2", "replays its own prompts"),
    ("lab bandits --profile h.yaml", "give --traces too"),
    ("lab drift --target x", "the pair has no draft model: give one with --draft"),
    ("lab drift --widths 0,2", "--widths 0,2: expected positive numbers"),
    ("lab drift --widths 9 --branching 9,9", "a tree of 819 nodes, at most 128"),
    ("lab drift --temperature 0", "expected more than 0"),
    ("lab drift --temperature nan", "--temperature: value: Input should be a finite number"),
    ("lab forwards --shape llama-9b", "expected one of llama-8b"),
    ("lab forwards --shape tiny --dtype int8", "expected bfloat16"),
    ("lab forwards --rows 0", "--rows 0: expected positive numbers"),
]


@pytest.fixture(scope="module")
def folder(tiny_pair, tmp_path_factory):
    """The folder in which commands are given, with the files that they name."""
    folder = tmp_path_factory.mktemp("folder")
    for name, drafter in DRAFTERS.items():
        config_file(folder, tiny_pair.spec, drafter).rename(folder / f"{name}.yaml")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, temperature in (("answers", 0.0), ("warm", 0.7), ("begun", 0.0)):
        recorded_answers(tiny_pair, folder / name, 4, 2, [temperature])
    (folder / "begun" / "0" / FINISHED).unlink()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    prompts_file(folder, (f"x{n} = {n} + " for n in range(6)), "sums")
    server_plan(folder, tiny_pair.spec, 6)
    return folder


@pytest.mark.parametrize(("line", "message"), ROWS, ids=[line for line, _ in ROWS])
def test_bad_input_is_one_line_and_nothing_is_written(
    line, message, command, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    for server in (OwnServer(), WordServer()):
        if server.name in line.split():  # other lines show what is in the table
            monkeypatch.setitem(SERVERS, server.name, server)
    before = sorted(folder.rglob("*"))
    assert_refused(command(app, tmp_path / "home", *shlex.split(line)), message)
    assert sorted(folder.rglob("*")) == before
    assert not any(path.is_file() for path in (tmp_path / "home").rglob("*"))
