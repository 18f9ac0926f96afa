"""A running server whose clients leave midway must lose nothing, and its JSON answers must follow
their schemas. Prompts and schemas are drawn at random, from a seed."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import httpx
import jsonschema
from prometheus_client.parser import text_string_to_metric_families

from specdec_core.base.errors import UserError

CLIENTS = 32
LEAVING = 1 / 3  # share of the requests that are given up midway
FLAT = 0.02  # by which memory may grow after warming up
_PART = 0.25  # share of the requests in which memory is looked at, at their beginning and end
ENDING = 0.99  # share of the JSON answers that must end by themselves
_LOOK = 0.25  # seconds between looks at the memory
_SETTLE = 30.0  # seconds in which the server has to notice that the last one has left
_SILENCE = 600.0
_ANSWERING = 8  # clients that ask for JSON
_LONGEST, _PROMPT = 400, 32  # tokens of a JSON answer, and room for its prompt
_WORDS = ("def", "class", "import", "return", "if", "for", "x", "y", "1", "2", "(", ")", ":", ".")


@dataclass
class Fire:
    """The outcome. `memory` has the server's bytes in the first quarter of the requests after
    warming up and in the last, where the server reports them."""

    answered: int = 0
    left: int = 0
    failed: list[str] = field(default_factory=list)
    running: float = 0.0
    cache: float = 0.0
    memory: tuple[float, float] | None = None

    @property
    def growth(self) -> float | None:
        """The relative growth of the memory after warming up."""
        return None if self.memory is None else self.memory[1] / self.memory[0] - 1

    @property
    def faults(self) -> list[str]:
        """One line for each fault."""
        faults = [f"{len(self.failed)} failed, the first: {self.failed[0]}"] if self.failed else []
        if self.running or self.cache:
            faults.append(f"{self.running:g} requests and {self.cache:.1%} of the cache were lost")
        if self.growth is not None and self.growth > FLAT:
            faults.append(f"memory grew by {self.growth:.1%}")
        return faults


@dataclass
class JsonAnswers:
    """How many JSON answers were asked for, how many ended by themselves, and which of these do not
    follow their schema."""

    asked: int = 0
    ended: int = 0
    invalid: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """One line for each fault."""
        faults = [f"{len(self.invalid)} invalid: {self.invalid[0]}"] if self.invalid else []
        if self.ended < ENDING * self.asked:
            faults.append(f"{self.ended} of {self.asked} ended")
        return faults


def under_fire(url: str, key: str | None, requests: int, seed: int = 0) -> Fire:
    """Send `requests` from :data:`CLIENTS` clients at once, of which a random third leaves midway,
    after as many that warm it up: until then its caches fill, as oneDNN's, which keeps the kernels
    for a thousand shapes. The server must have nothing else to do."""
    return asyncio.run(_with_client(url, key, lambda http: _fire(http, requests, seed)))


def json_answers(url: str, key: str | None, requests: int, seed: int = 0) -> JsonAnswers:
    """Ask for `requests` JSON answers by random schemas, sampled at temperature 1, every second one
    without speculation."""
    return asyncio.run(_with_client(url, key, lambda http: _answers(http, requests, seed)))


async def _with_client(
    url: str, key: str | None, call: Callable[[httpx.AsyncClient], Awaitable[Any]]
) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=_SILENCE, trust_env=False
    ) as http:
        try:
            return await call(http)
        except httpx.HTTPError as error:
            raise UserError(f"{url}: {error or type(error).__name__}") from None


async def _fire(http: httpx.AsyncClient, requests: int, seed: int) -> Fire:
    fire, random = Fire(), Random(seed)
    waiting = iter([(_body(random), random.random() < LEAVING) for _ in range(2 * requests)])
    done = 0
    seen: tuple[list[float], list[float]] = [], []

    async def client() -> None:
        nonlocal done
        for body, leaves in waiting:
            await _ask(http, body, random.randint(1, 8) if leaves else None, fire)
            done += 1

    async def look() -> None:
        while True:
            after = done / requests - 1
            if 0 < after <= _PART or after > 1 - _PART:
                memory = (await _metrics(http)).get("specdec:resident_memory_bytes")
                if memory is not None:
                    seen[after > _PART].append(memory)
            await asyncio.sleep(_LOOK)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    looking.cancel()
    if seen[0] and seen[1]:
        fire.memory = median(seen[0]), median(seen[1])
    for _ in range(int(_SETTLE / _LOOK)):
        now = await _metrics(http)
        fire.running = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
        fire.cache = now["vllm:kv_cache_usage_perc"]
        if not fire.running and not fire.cache:
            break
        await asyncio.sleep(_LOOK)
    return fire


def _body(random: Random) -> dict[str, Any]:
    return {
        "prompt": " ".join(random.choices(_WORDS, k=random.randint(1, 40))),
        "max_tokens": random.randint(8, 48),
        "temperature": random.choice([0, 1]),
        "n": random.choice([1, 1, 1, 2]),
        "ignore_eos": True,
        "stream": True,
    }


async def _ask(
    http: httpx.AsyncClient, body: Mapping[str, Any], most: int | None, fire: Fire
) -> None:
    """Read an answer to its end, or up to its event number `most`."""
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                await asyncio.sleep(0.2)  # its own queue is full; it is asked again
                continue
            if answer.status_code != httpx.codes.OK:
                fire.failed.append(f"status {answer.status_code}")
                return
            events = 0
            async for line in answer.aiter_lines():
                events += line.startswith("data:")
                if line.startswith('data: {"error"'):
                    fire.failed.append(line[:200])
                    return
                if line == "data: [DONE]":
                    fire.answered += 1
                    return
                if events == most:
                    fire.left += 1
                    return
            fire.failed.append("the answer broke off")
            return


async def _metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """All samples by name, summed over labels."""
    answer = await http.get("/metrics")
    answer.raise_for_status()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def _answers(http: httpx.AsyncClient, requests: int, seed: int) -> JsonAnswers:
    found, random = JsonAnswers(asked=requests), Random(seed)
    waiting = iter([(_schema(random), n) for n in range(requests)])
    models = await http.get("/v1/models")
    models.raise_for_status()
    most = min(_LONGEST, models.json()["data"][0]["max_model_len"] - _PROMPT)
    await asyncio.gather(*(_answer(http, waiting, most, found) for _ in range(_ANSWERING)))
    return found


async def _answer(
    http: httpx.AsyncClient,
    waiting: Iterator[tuple[dict[str, Any], int]],
    most: int,
    found: JsonAnswers,
) -> None:
    """Ask for answers, each by a schema and with a seed."""
    for schema, seed in waiting:
        shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = {"prompt": "Answer: ", "temperature": 1, "seed": seed, "max_tokens": most}
        body |= {"response_format": shape, "speculative": {"enabled": seed % 2 == 0}}
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] != "stop":
            continue
        found.ended += 1
        try:
            jsonschema.validate(json.loads(choice["text"]), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            found.invalid.append(f"{choice['text']!r}: {str(error).splitlines()[0]}")


def _schema(random: Random, within: bool = False) -> dict[str, Any]:
    """An object, or one `within` another, whose values end by themselves."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": random.randint(1, 6)},
        {"type": "integer", "minimum": 0, "maximum": 10 ** random.randint(1, 6)},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue", None]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": random.randint(1, 4)},
    ]
    names = random.sample(["name", "count", "valid", "colour", "flags", "inner"], 3)
    properties = {name: random.choice(leaves) for name in names}
    if not within and random.random() < 0.5:
        properties[names[0]] = _schema(random, within=True)
    return {
        "type": "object",
        "properties": properties,
        "required": names[: random.randint(1, 3)],
        "additionalProperties": False,
    }
