"""A comparison of servers under load with times that are made up, shared by its tests."""

from datetime import UTC, datetime

from specdec_core.config import AUTOREGRESSIVE, PairSpec, RunnerSettings
from specdec_core.evidence.load.result import LoadResult, LoadRow
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.load.records import LoadRecord
from specdec_core.search.load.workload import Load, Slo
from tests.configurations import CHAIN

TOKENS, REQUESTS = 11, 8


def records(ttft: float, tpot: float, clients: int) -> list[LoadRecord]:
    """`REQUESTS` answers, sent as clients become free; later ones take a little longer."""
    done = []
    for index in range(REQUESTS):
        slower = 1 + index / 100
        sent = (index // clients) * slower * (ttft + (TOKENS - 1) * tpot)
        first = sent + slower * ttft
        done.append(
            LoadRecord(
                index=index,
                sent=sent,
                first=first,
                last=first + slower * (TOKENS - 1) * tpot,
                prompt_tokens=20,
                tokens=TOKENS,
                text=f"text {index}",
                status=200,
            )
        )
    return done


def load_row(name: str, group: str, ttft: float, tpot: float, **more: object) -> LoadRow:
    """A row with two repeats at 1 and 4 clients, where everything takes twice as long."""
    runs = {
        str(clients): [records(factor * ttft, factor * tpot, clients) for _ in range(2)]
        for clients, factor in ((1, 1.0), (4, 2.0))
    }
    return LoadRow(name=name, group=group, version=f"{group} 1", runs=runs, **more)


def load_result(dtype: str = "bfloat16") -> LoadResult:
    """Ours autoregressive and a chain, vLLM's autoregressive and n-gram."""
    return LoadResult(
        name="tiny",
        started=datetime(2026, 11, 1, tzinfo=UTC),
        command="specdec bench serve --clients 1,4",
        pair=PairSpec(runner=RunnerSettings(target_dtype=dtype, draft_dtype=dtype)),
        prompts=PromptSet(source="made.jsonl", count=12, digest="0" * 64),
        max_new_tokens=TOKENS,
        repeats=2,
        loads=[Load(clients=n, requests=REQUESTS) for n in (1, 4)],
        rows=[
            load_row(
                "autoregressive", "specdec", 0.1, 0.01, autoregressive=True,
                configuration=AUTOREGRESSIVE,
            ),
            load_row("chain", "specdec", 0.1, 0.005, configuration=CHAIN),
            load_row("vLLM", "vllm", 0.05, 0.012, autoregressive=True),
            load_row("vLLM n-gram K=4", "vllm", 0.05, 0.008),
        ],
        notes=["made up"],
    )  # fmt: skip


def open_result() -> LoadResult:
    """Ours autoregressive and a chain, at a rate of 2 requests a
    second: they come evenly, and are sent 10 ms late."""
    rows = load_result().rows[:2]
    for row in rows:
        for record in row.runs["1"][0]:
            arrival = record.index / 2
            shift = arrival - record.sent
            record.arrival, record.sent = arrival, arrival + 0.01
            record.first, record.last = record.first + shift, record.last + shift
            if row.name == "chain":
                record.rounds, record.drafted = 4, 10
        row.runs = {"2/s": row.runs["1"][:1]}
    return load_result().model_copy(
        update={
            "loads": [Load(rate=2.0, requests=REQUESTS)],
            "repeats": 1,
            "slo": Slo(latency=0.17),
            "rows": rows,
        }
    )
