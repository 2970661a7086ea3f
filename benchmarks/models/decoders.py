"""Time a Llama-like decoder in fp16 with fusec.Generator and with torch, whose steps are captured as CUDA graphs.

Usage, with a GPU and torch: python -m benchmarks.models.decoders [--batch 1] [--layers 8] [--bits 16]
    [--peers eager,compile] [--parts decode,prompt] [--peer-seconds 100] [--tune quick]
The model has the sizes of Llama 3 8B but for its layers and vocabulary. Weights are drawn; with `--bits 4` those of
products have 4 bits, and torch gets them in fp16. The cache of 2,048 tokens is nearly full. The peers are torch eager
and torch.compile with max-autotune, with a static cache: `compile` compiles the whole step, and `layers` one layer that
all layers use, which is ready sooner. Logits after a prompt and after tokens that are given are compared with torch in
fp32. The limit is the time to read weights and cache once. Writes benchmarks/results/decoders.json. With --simulate, a
small decoder runs without a GPU, and nothing is timed or written.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fusec
from benchmarks.common.attempt import Attempt, TooLongError, within
from benchmarks.common.result_files import parser
from benchmarks.common.torch_timing import (
    PRODUCTS,
    Autotune,
    autotuned,
    autotuned_together,
    best_peer_over_fusec,
    captured,
    device_ms,
    free_memory,
    relative_l2,
    start_workers,
    timed,
)
from benchmarks.models.decoder_model import FORMS, WEIGHTS, Decoder, FileWriter, attend
from examples.decode import Config
from fusec.passes.partition.cost_model import limit_us
from fusec.runtime import Executable
from fusec.schedule.program import Kind

NAME = "decoders.json"
PEERS, PARTS = ("eager", "compile", "layers"), ("decode", "prompt")
LLAMA = Config(32000, 4096, 14336, 8, 32, 8, 2048)
SMALL = Config(96, 64, 128, 2, 4, 2, 64)
GIVEN = 7  # tokens after the prompt whose logits are compared
COMPARED = 2  # sequences that are compared
LOOPS, LOOP_TOKENS = 5, 64  # loops over tokens, timed by the host's clock
TOLERANCE = 3e-2  # relative L2 of logits in fp16
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Options that all parts share.

    bits: bits of a weight: 16 or 4.
    peer_s: seconds after which a peer that is not ready is left out; 0 is no limit.
    """

    config: Config
    batch: int
    bits: int
    peers: tuple[str, ...]
    parts: tuple[str, ...]
    peer_s: float
    tune: str
    simulate: bool

    @property
    def capacity(self) -> int:
        return self.config.max_position_embeddings

    @property
    def length(self) -> int:
        """Return the tokens of the prompts, after which steps are timed."""
        return self.capacity * 7 // 8

    @property
    def device(self) -> str:
        return "cpu" if self.simulate else "cuda"


@dataclass
class Peer:
    """A peer: `step` and `prompt` run again what was captured, and leave logits in `logits` and `prompt_logits`."""

    model: Decoder
    step: Callable[[], None]
    logits: torch.Tensor
    prompt: Callable[[], None] | None = None
    prompt_logits: torch.Tensor | None = None


@dataclass
class Case:
    """A decoder with its tokens, and the row of its measurements."""

    settings: Settings
    weights: FileWriter
    ids: torch.Tensor  # i64[B, capacity]
    row: Row
    peers: dict[str, Peer] = field(default_factory=dict[str, Peer])

    @property
    def given(self) -> torch.Tensor:
        """Return the tokens after the prompt whose logits are compared, [B, GIVEN]."""
        return self.ids[:, self.settings.length : self.settings.length + GIVEN]


def drawn(settings: Settings, folder: Path) -> tuple[Case, Path]:
    """Write the model, and draw its tokens."""
    started = time.perf_counter()
    weights = FileWriter(settings.config, folder, settings.bits, settings.device)
    path = weights.write()
    ids = torch.randint(0, settings.config.vocab_size, (settings.batch, settings.capacity), device=settings.device)
    row: Row = {"layers": settings.config.num_hidden_layers, "batch": settings.batch, "bits": settings.bits}
    row |= {"capacity": settings.capacity, "length": settings.length}
    row["written_s"] = round(time.perf_counter() - started, 2)
    return Case(settings, weights, ids, row), path


def reference(case: Case) -> torch.Tensor:
    """Return the logits f32[COMPARED, 1 + GIVEN, V] after the prompt and each token that is given, in fp32."""
    settings = case.settings
    with torch.inference_mode():
        wide = Decoder(settings.config, case.weights, min(COMPARED, settings.batch), torch.float32)
        return wide.all_logits(case.ids[:COMPARED, : settings.length + GIVEN], 1 + GIVEN)


def compiled(case: Case, path: Path) -> fusec.Generator:
    """Compile the decode step and the program of prompts, and record how long it took."""
    settings = case.settings
    options: Row = {"target": "h200", "simulate": True} if settings.simulate else {"tune": settings.tune}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FUSEC_CACHE"] = cache  # an empty cache
        started = time.perf_counter()
        generator = fusec.Generator(
            path,
            batch=settings.batch,
            max_length=settings.capacity,
            prompt_sizes=[settings.capacity],
            precision="fp16",
            **options,
        )
        case.row["decode_compile_s"] = round(time.perf_counter() - started, 2)
        started = time.perf_counter()
        case.row["fusec_logits"] = logits(case, generator)
        case.row["prompt_compile_s"] = round(time.perf_counter() - started, 2)  # and the first calls
    programs = {"decode": generator.decode, "prompt": generator.prompts[settings.capacity]}
    case.row["launches"] = {name: one.compiled.program.launches for name, one in programs.items()}
    parts = {name: one.spent.stages for name, one in programs.items() if one.spent is not None}
    case.row["compile_parts_s"] = {
        name: {what: round(spent.seconds, 2) for what, spent in stages.items()} for name, stages in parts.items()
    }
    return generator


def logits(case: Case, generator: fusec.Generator) -> torch.Tensor:
    """Return fusec's logits [B, 1 + GIVEN, V] after the prompt, and after each token that is given."""
    found: list[np.ndarray[Any, Any]] = []
    given = np.concatenate([case.given.cpu().numpy(), np.zeros((case.settings.batch, 1), np.int64)], 1)

    def choose(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found.append(scores)
        return given[:, len(found) - 1]

    generator(case.ids[:, : case.settings.length].cpu().numpy(), 1 + GIVEN, choose=choose)
    return torch.from_numpy(np.stack(found, 1)).to(case.settings.device)


def graph(run: Callable[[], torch.Tensor], device: str) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture torch's work on a GPU; elsewhere return it as it is, writing into its first result."""
    if device == "cuda":
        return captured(run)
    out = run()

    def again() -> None:
        out.copy_(run())

    return again, out


def fastest_attention(case: Case) -> str:
    """Time the ways of torch to attend from one query to the cache, and return the fastest."""
    config, settings = case.settings.config, case.settings
    shape = (settings.batch, config.num_key_value_heads, settings.capacity, config.head_dim)
    keys, values = (torch.randn(shape, device="cuda").half() for _ in range(2))
    q = torch.randn(settings.batch, config.num_attention_heads, 1, config.head_dim, device="cuda").half()
    mask = torch.arange(settings.capacity, device="cuda")[None] < settings.length
    replays: dict[str, Callable[[], None]] = {}
    for form in FORMS:
        try:
            replays[form], _ = captured(lambda form=form: attend(form, q, keys, values, mask))
        except RuntimeError as reason:  # torch has no kernel for this form
            case.row.setdefault("missing", {})[f"attention {form}"] = str(reason)
    times = timed(replays, rounds=5, round_s=0.01)
    case.row["torch_attention_us"] = {form: 1000 * time["median_ms"] for form, time in times.items()}
    return min(times, key=lambda form: times[form]["median_ms"])


def peer(case: Case, name: str) -> Peer:
    """Capture a peer's decode step and, where it is wanted, its prompt."""
    settings = case.settings
    model = Decoder(settings.config, case.weights, settings.batch)
    model.attention = case.row.get("attention", model.attention)
    model.start(case.given[:, 0], settings.length)

    def fast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return autotuned(function, Autotune(products=PRODUCTS)) if name == "compile" else function

    if name == "layers":
        model.layer, model.last = autotuned_together([model.layer, model.last], Autotune(products=PRODUCTS))
    step, out = graph(fast(model.step), settings.device)
    made = Peer(model, step, out)
    if "prompt" in settings.parts:
        prompt = fast(model.prompt)
        made.prompt, made.prompt_logits = graph(lambda: prompt(case.ids), settings.device)
    return made


def peer_logits(case: Case, one: Peer) -> torch.Tensor:
    """Return a peer's logits [B, GIVEN, V] after each token that is given, over the cache of torch's own prompt."""
    one.model.prompt(case.ids[:, : case.settings.length])
    found: list[torch.Tensor] = []
    for i in range(GIVEN):
        one.model.start(case.given[:, i], case.settings.length + i)
        one.step()
        found.append(one.logits.clone())
    return torch.stack(found, 1)


def prepare_peers(case: Case, want: torch.Tensor, attempt: Attempt) -> None:
    """Prepare the peers, and compare their logits."""
    settings = case.settings
    for name in settings.peers:
        started = time.perf_counter()
        try:
            with within(settings.peer_s):
                case.peers[name] = peer(case, name)
        except TooLongError as reason:
            case.row.setdefault("missing", {})[name] = str(reason)
            attempt.say(f"{name}: {reason}")
            continue
        case.row[f"{name}_compile_s"] = round(time.perf_counter() - started, 2)
        compare(case, name, peer_logits(case, case.peers[name]), want[:, 1:])
        attempt.say(f"{name} captured, error {case.row['errors'][name]:.1e}")


def compare(case: Case, who: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Record the error of logits, and how many of the best tokens are those of torch in fp32."""
    got = got[:COMPARED]
    case.row.setdefault("errors", {})[who] = relative_l2(got, want)
    case.row.setdefault("same_tokens", {})[who] = float((got.argmax(-1) == want.argmax(-1)).double().mean())


def span(start: Callable[[], None], run: Callable[[], None], most: int) -> Callable[[int], float]:
    """Return a function that starts anew and times a number of steps, at most `most`; it returns the ms of one."""

    def spanned(count: int) -> float:
        start()
        return device_ms(run, min(count, most))

    return spanned


def time_steps(case: Case, generator: fusec.Generator, attempt: Attempt) -> None:
    """Time decode steps on the device, then loops over tokens by the host's clock, and each of fusec's steps."""
    settings, row, decode = case.settings, case.row, generator.decode
    lengths, tokens = np.full(settings.batch, settings.length), case.given[:, :1].cpu().numpy()
    most = settings.capacity - settings.length - 1

    def start() -> None:
        decode.bind(lengths=lengths, tokens=tokens)

    spans = {"fusec": span(start, decode.replay, most)}
    for name, one in case.peers.items():
        again = lambda one=one: one.model.start(case.given[:, 0], settings.length)  # noqa: E731
        spans[name] = span(again, one.step, most)
    row["times"] = timed({}, spans=spans)
    row["best_peer_over_fusec"] = best_peer_over_fusec(row["times"], settings.peers) if settings.peers else None
    cache = sum(one.nbytes for one in generator.explain().cache)
    row["weight_bytes"], row["cache_bytes"] = case.weights.read_bytes, cache * settings.length // settings.capacity
    row["limit_ms"] = 1000 * (row["weight_bytes"] + row["cache_bytes"]) / decode.compiled.target.memory_bandwidth
    row["share_of_limit"] = row["limit_ms"] / row["times"]["fusec"]["median_ms"]
    attempt.say(f"ms of a step: {medians(row['times'])}, limit {row['limit_ms']:.3f}")
    attempt.keep(row)
    row["loop_ms"] = loops(case, generator)
    attempt.say(f"ms of a token in a loop: {row['loop_ms']}")
    start()
    row["steps"], row["sum_ms"] = steps_of(decode)


def steps_of(program: Executable, count: int = 5) -> tuple[list[Row], float]:
    """Time each step alone. Return a row for each, and the sum in ms.

    `measure` is not used, because it fetches all outputs, and so the cache.
    """
    _, times = program.time_us(count)
    libraries, target = program.libraries(), program.compiled.target
    rows = [
        {
            "step": step.signature,
            "kind": libraries.get(step, step.kind.value),
            "us": round(statistics.median(series), 2),
            "limit_us": round(limit_us(step.nodes, target), 2),
        }
        for step, series in zip(program.compiled.program.steps, times, strict=True)
        if step.kind is not Kind.VIEW
    ]
    return rows, sum(row["us"] for row in rows) / 1000


def medians(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {who: round(time["median_ms"], 4) for who, time in times.items()}


def loops(case: Case, generator: fusec.Generator) -> dict[str, float]:
    """Return medians of the ms of a token in a loop that reads each token on the host, as a user has it."""
    settings = case.settings
    count = min(LOOP_TOKENS, settings.capacity - settings.length - 1)

    def by_fusec() -> float:
        stream = generator.stream(case.ids[:, : settings.length].cpu().numpy(), count + 1)
        next(stream)  # reads the prompt
        started = time.perf_counter()
        for tokens in stream:
            tokens.tolist()
        return time.perf_counter() - started

    def by_peer(one: Peer) -> float:
        one.model.start(case.given[:, 0], settings.length)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            one.step()
            one.model.tokens.tolist()
        return time.perf_counter() - started

    turns = {"fusec": by_fusec, **{name: (lambda one=one: by_peer(one)) for name, one in case.peers.items()}}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(LOOPS):
        for name, turn in turns.items():
            seconds[name].append(turn())
    return {name: 1000 * statistics.median(series) / count for name, series in seconds.items()}


def time_prompt(case: Case, generator: fusec.Generator, attempt: Attempt) -> None:
    """Time prompts that fill the cache."""
    import cupy  # here, because --simulate needs none

    settings, row = case.settings, case.row
    program = generator.prompts[settings.capacity]
    program.hold_inputs()  # as the peers do
    generator.decode.bind(lengths=np.full(settings.batch, settings.capacity))
    feeds = {"prompt": cupy.asarray(case.ids.cpu().numpy())}
    for _ in range(2):
        program.run(["next"], feeds)
    program.backend.finish()
    peers = {name: one.prompt for name, one in case.peers.items() if one.prompt is not None}
    row["prompt_times"] = timed({"fusec": program.replay, **peers}, rounds=9)
    attempt.say(f"ms of a prompt: {medians(row['prompt_times'])}")
    ratio = best_peer_over_fusec(row["prompt_times"], settings.peers) if settings.peers else None
    row["prompt_best_peer_over_fusec"] = ratio
    row["prompt_steps"], row["prompt_sum_ms"] = steps_of(program)
    row["prompt_limit_ms"] = sum(step["limit_us"] for step in row["prompt_steps"]) / 1000


def run(settings: Settings, attempt: Attempt) -> Row:
    """Measure a decoder."""
    with tempfile.TemporaryDirectory() as folder:
        case, path = drawn(settings, Path(folder))
        attempt.say(f"model written, {path.with_name(WEIGHTS).stat().st_size / 1e9:.2f} GB of weights")
        generator = compiled(case, path)
    attempt.say(f"compiled: {case.row['launches']} launches")
    want = reference(case)
    compare(case, "fusec", case.row.pop("fusec_logits"), want)
    attempt.say(f"errors: {case.row['errors']}")
    with torch.inference_mode():
        if not settings.simulate:
            case.row["attention"] = fastest_attention(case)
        prepare_peers(case, want, attempt)
        case.row["ok"] = all(error <= TOLERANCE for error in case.row["errors"].values())
        for part, measured in (("decode", time_steps), ("prompt", time_prompt)):
            if part in settings.parts and not settings.simulate:
                measured(case, generator, attempt)
                attempt.keep(case.row)  # because a later part may fail
    return case.row


def show(row: Row, worst: int) -> None:
    """Print a row, and its `worst` slowest steps."""
    for name, value in row.items():
        if name not in ("steps", "prompt_steps"):
            print(f"  {name}: {value}")
    for part in ("steps", "prompt_steps"):
        for step in sorted(row.get(part, ()), key=lambda s: -s["us"])[:worst]:
            print(f"      {step['us']:8.1f} {step['limit_us']:7.1f} {step['kind']:7} {step['step'][:100]}")


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--batch", type=int, default=1, help="sequences")
    options.add_argument("--layers", type=int, default=0, help="layers; default 8, and 2 in simulation")
    options.add_argument("--bits", type=int, default=16, choices=(4, 16), help="bits of a weight")
    options.add_argument("--peers", default="eager,compile", help=f"the peers to measure, of {', '.join(PEERS)}")
    options.add_argument("--parts", default=",".join(PARTS), help="the parts to measure, separated by commas")
    options.add_argument("--peer-seconds", type=float, default=100.0, help="leave out a slower peer; 0: no limit")
    options.add_argument("--tune", default="quick")
    options.add_argument("--simulate", action="store_true", help="run a small decoder without a GPU, and time nothing")
    options.add_argument("--worst", type=int, default=12, help="number of the slowest steps to print")
    given = options.parse_args()
    config = SMALL if given.simulate else LLAMA
    config = replace(config, num_hidden_layers=given.layers or config.num_hidden_layers)
    chosen: dict[str, tuple[str, ...]] = {}
    for name, known in (("peers", PEERS), ("parts", PARTS)):
        chosen[name] = tuple(one for one in getattr(given, name).split(",") if one)
        if unknown := set(chosen[name]) - set(known):
            options.error(f"--{name} takes {', '.join(known)}, not {', '.join(sorted(unknown))}")
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = Settings(
        config=config,
        batch=given.batch,
        bits=given.bits,
        peer_s=given.peer_seconds,
        tune=given.tune,
        simulate=given.simulate,
        **chosen,
    )
    if set(settings.peers) - {"eager"}:
        start_workers()  # while the model is written
    row = run(settings, Attempt(given.output, given.commit))
    show(row, given.worst)
    if not given.simulate:
        free_memory()
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
