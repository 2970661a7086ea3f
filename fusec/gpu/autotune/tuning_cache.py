"""What is known of plans and forms before anything is measured: kept here, or named by a lock or an artefact.

A plan kept as cuDNN serialized it is revived in milliseconds; one that cuDNN refuses is dropped and built anew.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from fusec.errors import ExecutionError
from fusec.gpu import autotune, cublaslt, kernels, measure
from fusec.gpu.autotune.plan_search import Offer, PlanBench, RankedPlans
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.passes import partition
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, Part, PlanKey

Suggested = Mapping[str, Sequence[Entry]]  # by key of the cuDNN graph, best first


class RevivingPlanBench(PlanBench, Protocol):
    """A laboratory that reads serialized plans, too."""

    def revive(self, graph: CudnnGraph, blob: bytes) -> Any:
        """The plan, ready to run. ExecutionError if cuDNN does not take it."""
        ...

    def serialized(self, plan: Any) -> bytes | None:
        """A plan as cuDNN serializes it; None if it cannot be."""
        ...

    def is_revived(self, plan: Any) -> bool:
        """Whether a plan was read from what cuDNN serialized."""
        ...


@dataclass(frozen=True)
class TuningEnvironment:
    """Where plans hold: the target, and what of the machine and its libraries they depend on."""

    target: str
    device: str
    driver: str
    cudnn: str
    frontend: str

    def key(self, work: str, level: str) -> PlanKey:
        """Of a graph, or of other work, at a tuning level."""
        return PlanKey(work, self.target, self.device, self.driver, self.cudnn, self.frontend, level)


class TuningCache:
    """Plans and forms for one place and tuning level. suggested: plans made elsewhere; with level `none` they come
    first, else they are taken, if they were measured, where this machine knows nothing. accept_incomplete: what is
    known of a graph is enough, though not every plan was timed."""

    def __init__(
        self,
        store: PlanStore,
        place: TuningEnvironment,
        level: str,
        suggested: Suggested | None = None,
        accept_incomplete: bool = False,
    ):
        self.store = store
        self.environment = place
        self.level = level
        self.accept_incomplete = accept_incomplete
        self._suggested = suggested or {}

    # plans -------------------------------------------------------------------------------------------

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Know of plans made elsewhere, too."""
        self._suggested = {**self._suggested, **{key: [Entry(choice)] for key, choice in choices.items()}}

    def entry(self, graph: str) -> Entry | None:
        """What is known of a graph, by its key: its choice and perhaps its plan, serialized; none in quarantine."""
        here = self.store.get(self.environment.key(graph, self.level))
        there = next(iter(self._suggested.get(graph, ())), None)
        if there is not None and self.level != "none" and there.choice.time_us is None:
            there = None
        entry = (there or here) if self.level == "none" else (here or there)
        if entry is None or self.wrong(graph, entry.choice) is not None:
            return None
        if entry.blob is None:
            named = self.store.get(self._named(graph, entry.choice))
            if named is not None and named.choice.identity == entry.choice.identity:
                entry = replace(entry, blob=named.blob)
        return entry

    def carried(self, graph: str) -> tuple[Entry, ...]:
        """The plans made elsewhere, never measured, of which the fastest is to be found."""
        entries = self._suggested.get(graph, ())
        return tuple(entry for entry in entries if self.wrong(graph, entry.choice) is None)

    def enough(self, entry: Entry) -> bool:
        """Whether a known plan is taken without measuring."""
        return entry.choice.complete or self.accept_incomplete or self.level == "none"

    def revived(self, graphs: Mapping[str, CudnnGraph], bench: RevivingPlanBench) -> dict[str, RankedPlans]:
        """Those of the graphs whose plan is kept serialized, and can be had from that."""
        found: dict[str, RankedPlans] = {}
        for key, graph in graphs.items():
            entry = self.entry(key)
            if entry is None or entry.blob is None or not self.enough(entry):
                continue
            try:
                found[key] = RankedPlans(graph, [(entry.choice, bench.revive(graph, entry.blob))], revived=True)
            except ExecutionError as error:
                self.drop(key, entry.choice, str(error))
        return found

    def keep(self, graph: CudnnGraph, choice: Choice, plan: Any, bench: RevivingPlanBench, best: bool = False) -> None:
        """Keep a plan serialized, if what comes of that computes the same; one that was revived does. best: it is the
        one to take, which is remembered in any case."""
        kept = self._keep(graph, choice, plan, bench, best)
        if best and not kept:
            self.choose(graph.key, choice)

    def _keep(self, graph: CudnnGraph, choice: Choice, plan: Any, bench: RevivingPlanBench, best: bool) -> bool:
        at = self.environment.key(graph.key, self.level) if best else self._where(graph.key, choice)
        known = self.store.get(at)
        if known is not None and known.blob is not None and known.choice == choice:
            return True
        blob = bench.serialized(plan)
        if blob is None:
            return False
        try:
            error = 0.0 if bench.is_revived(plan) else bench.error(graph, bench.revive(graph, blob), plan)
        except ExecutionError as reason:
            warnings.warn(f"{choice.name} cannot be kept serialized: {reason}", stacklevel=4)
            return False
        if error is not None and error <= TOLERANCE:
            self.store.put(at, Entry(choice, blob))
            return True
        warnings.warn(f"{choice.name} is not kept: revived, its results are off by {error}", stacklevel=4)
        return False

    def drop(self, graph: str, choice: Choice, reason: str) -> None:
        """Forget a plan as it was serialized, though not that it is the one to take."""
        for level in (self.level, self._name(choice)):
            self.store.drop_blob(self.environment.key(graph, level), reason)
        entries = list(self._suggested.get(graph, ()))
        for place, entry in enumerate(entries):
            if entry.blob is not None and entry.choice.identity == choice.identity:
                warnings.warn(f"{choice.name}: its serialized plan does not serve ({reason})", stacklevel=3)
                entries[place] = replace(entry, blob=None)
        self._suggested = {**self._suggested, graph: entries}

    def choose(self, graph: str, choice: Choice) -> None:
        """Remember which plan was found to be the best."""
        known = self.store.get(self.environment.key(graph, self.level))
        if known is None or known.choice != choice:
            self.store.put(self.environment.key(graph, self.level), Entry(choice))

    def take(self, entries: Mapping[str, Entry]) -> None:
        """Remember plans as those to take, unless others are known."""
        places = {self.environment.key(graph, self.level): entry for graph, entry in entries.items()}
        self.store.put_all({place: entry for place, entry in places.items() if self.store.get(place) is None})

    def _where(self, graph: str, choice: Choice) -> PlanKey:
        """Of the choice of this level, if that is the one; else of a plan that somebody named."""
        at = self.environment.key(graph, self.level)
        known = self.store.get(at)
        chosen = known is not None and known.choice.identity == choice.identity
        return at if chosen else self._named(graph, choice)

    def _named(self, graph: str, choice: Choice) -> PlanKey:
        return self.environment.key(graph, self._name(choice))

    @staticmethod
    def _name(choice: Choice) -> str:
        return f"engine {choice.engine} {dict(choice.knobs)}"

    # quarantine --------------------------------------------------------------------------------------

    def distrust(self, graphs: Mapping[str, CudnnGraph]) -> None:
        """Put plans in quarantine that were kept, or named, before `known_bugs` knew that they are wrong."""
        for key, graph in graphs.items():
            known = self.store.get(self.environment.key(key, self.level))
            for entry in (*([known] if known is not None else []), *self._suggested.get(key, ())):
                choice = entry.choice
                reason = wrong_plan(graph, choice.engine, dict(choice.knobs))
                if reason is not None and self.wrong(key, choice) is None:
                    self.note(key, choice, reason)

    def wrong(self, graph: str, choice: Choice) -> str | None:
        """Why a plan is in quarantine; None if it is not."""
        found = self.store.quarantined(graph, self.environment.target, self.environment.cudnn)
        return next((why for engine, knobs, why in found if (engine, knobs) == choice.identity), None)

    def note(self, graph: str, choice: Choice, reason: str) -> None:
        """Put a plan in quarantine."""
        target, cudnn = self.environment.target, self.environment.cudnn
        self.store.quarantine(graph, target, cudnn, choice.engine, choice.knobs, reason)

    # forms -------------------------------------------------------------------------------------------

    def step_choice(self, work: str, launch_us: float) -> tuple[Part, ...] | None:
        """The form found to be the fastest for a step of that work (`forms.step_key`)."""
        found = self.store.form(self._form_key(work, launch_us))
        try:
            return None if found is None else tuple(map(Part.from_json, found["parts"]))
        except (KeyError, TypeError, ValueError):
            return None  # of another version: it is measured again

    def store_step_choice(self, work: str, launch_us: float, parts: Sequence[Part]) -> None:
        """Remember the fastest form."""
        self.store.put_form(self._form_key(work, launch_us), {"parts": [part.to_json() for part in parts]})

    def kernel_variant(self, kernel: str) -> Mapping[str, Any]:
        """What was measured of a kernel, by its key: see `Launcher.recall`."""
        return self.store.form(self.environment.key(f"kernel {kernel}", self.level)) or {}

    def store_kernel_variant(self, kernel: str, measured: Mapping[str, Any]) -> None:
        """Remember what was measured of a kernel."""
        self.store.put_form(self.environment.key(f"kernel {kernel}", self.level), measured)

    def _form_key(self, work: str, launch_us: float) -> PlanKey:
        return self.environment.key(f"form {work_digest(work)} {launch_us} {candidate_code_digest()}", self.level)


def work_digest(work: str) -> str:
    """Short and of one line."""
    return hashlib.sha256(work.encode()).hexdigest()


@cache
def candidate_code_digest() -> str:
    """What competes with cuDNN's plans, as a digest: a form is the fastest among what there was."""
    digest = hashlib.sha256()
    for package in (autotune, cublaslt, kernels, measure, partition):
        for source in _sources(resources.files(package)):
            digest.update(source)
    return digest.hexdigest()


def _sources(folder: Traversable) -> Iterator[bytes]:
    """Read the code below a folder in the order of names, whatever files there are."""
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith((".py", ".cuh")):
            yield entry.read_bytes()


class SuggestedPlansBench:
    """A laboratory in which only plans made elsewhere compete: revived where they may be, else built by name if they
    are precompiled; nothing is simulated, they vote."""

    def __init__(self, bench: RevivingPlanBench, kept: TuningCache):
        self._lab, self._kept = bench, kept

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        entries = self._kept.carried(graph.key)
        if all(entry.blob is not None for entry in entries):
            return [Offer(place, entry.choice, True) for place, entry in enumerate(entries)]
        named = [entry.choice.identity for entry in entries]
        offered = [o for o in self._lab.offers(graph) if o.choice.identity in named]
        ready = [o for o in offered if o.precompiled] or offered[:1]
        return sorted(ready, key=lambda o: named.index(o.choice.identity))

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        self._lab.expect(orders)

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        wanted = offer.choice.identity
        blob = next((e.blob for e in self._kept.carried(graph.key) if e.choice.identity == wanted), None)
        if blob is not None:
            try:
                return self._lab.revive(graph, blob)
            except ExecutionError as error:
                self._kept.drop(graph.key, offer.choice, str(error))
        here = next((o for o in self._lab.offers(graph) if o.choice.identity == wanted), None)
        if here is None:
            raise ExecutionError("cuDNN does not offer it here")
        return self._lab.build(graph, here)

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        return self._lab.time_us(graph, plan)

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        return None if other is None else self._lab.error(graph, plan, other)

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        self._lab.quarantine(graph, choice, reason)
