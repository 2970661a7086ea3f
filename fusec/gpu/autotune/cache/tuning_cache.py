"""Cache tuned choices on disk, and add the choices that a lock file, a compiled file or another input shape names.

A serialized plan is read in milliseconds. If cuDNN does not read it, it is dropped, and the plan is built again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.cache.code_digest import candidate_code_digest
from fusec.gpu.autotune.cache.tuning_environment import TuningEnvironment
from fusec.gpu.autotune.ranked_plans import RankedPlans, RevivingPlanBench
from fusec.gpu.cudnn import load_engines
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import BLAS, Choice, Entry, Knobs, Part, PlanKey
from fusec.system.dataclass import dataclass

Suggested = Mapping[str, Sequence[Entry]]  # by key of the cuDNN graph, best first


@dataclass(frozen=True)
class KnownChoices:
    """Choices from a lock file, a compiled file or another input shape.

    plans: plans of cuDNN graphs, by key, the best first. With level `none` they come first. With another level a plan
        that was timed is used where this machine has none. Plans that were not timed compete with each other alone.
    variants: for the key of a kernel, the key of the variant to run
    kernels: compiled kernels that are trusted, by key of the source (`cubins.CudaSource`)
    accept_incomplete: a stored choice is used even if not every plan was timed
    side_by_side: run steps on several streams without timing that
    """

    plans: Suggested = field(default_factory=dict[str, Sequence[Entry]])
    variants: Mapping[str, str] = field(default_factory=dict[str, str])
    kernels: Mapping[str, Entry] = field(default_factory=dict[str, Entry])
    accept_incomplete: bool = False
    side_by_side: bool = False


class TuningCache:
    """Choices of plans, steps and kernel variants for one environment and tuning level."""

    def __init__(self, store: PlanStore, environment: TuningEnvironment, level: str, known: KnownChoices):
        self.plan_store = store
        self.environment = environment
        self.level = level
        self._accept_incomplete = known.accept_incomplete
        self._suggested = known.plans
        self._known_kernels = known.kernels
        self._read: dict[PlanKey, Entry] = {}  # what `quarantine_known_wrong` read, each for one use
        self._recorded = set[int]()  # engines of which a plan is recorded
        self._quarantined: dict[str, list[tuple[int, Knobs, str]]] = {}  # by graph, because each plan is looked up

    @property
    def names_cublaslt(self) -> bool:
        """Tell if a suggested plan is one of cuBLASLt."""
        return any(entry.choice.engine == BLAS for entries in self._suggested.values() for entry in entries)

    # plans -------------------------------------------------------------------------------------------

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Suggest plans of graphs, by key."""
        self._suggested = {**self._suggested, **{key: [Entry(choice)] for key, choice in choices.items()}}

    def entry(self, graph: str) -> Entry | None:
        """Return the choice for a graph, by key, with its serialized plan if there is one; never one in quarantine."""
        at = self.environment.key(graph, self.level)
        stored = self._read.pop(at, None) or self.plan_store.get(at)
        suggested = next(iter(self._suggested.get(graph, ())), None)
        if suggested is not None and self.level != "none" and suggested.choice.time_us is None:
            suggested = None
        entry = (suggested or stored) if self.level == "none" else (stored or suggested)
        if entry is None or self.quarantine_reason(graph, entry.choice) is not None:
            return None
        if entry.blob is None:
            named = self.plan_store.get(self._key_by_name(graph, entry.choice))
            if named is not None and named.choice.identity == entry.choice.identity:
                entry = replace(entry, blob=named.blob)
        return entry

    def suggested(self, graph: str) -> tuple[Entry, ...]:
        """Return the plans suggested for a graph, without those in quarantine."""
        entries = self._suggested.get(graph, ())
        return tuple(entry for entry in entries if self.quarantine_reason(graph, entry.choice) is None)

    def is_enough(self, entry: Entry) -> bool:
        """Tell if a stored choice is used without timing others."""
        return entry.choice.complete or self._accept_incomplete or self.level == "none"

    def revived(self, graphs: Mapping[str, CudnnGraph], bench: RevivingPlanBench) -> dict[str, RankedPlans]:
        """Read the serialized plans of graphs, where there are some that cuDNN accepts."""
        found: dict[str, RankedPlans] = {}
        for key, graph in graphs.items():
            entry = self.entry(key)
            if entry is None or entry.blob is None or not self.is_enough(entry):
                continue
            try:
                found[key] = RankedPlans(graph, [(entry.choice, bench.revive(graph, entry.blob))], revived=True)
            except ExecutionError as error:
                self.drop(key, entry.choice, str(error))
        return found

    def store_plan(
        self, graph: CudnnGraph, choice: Choice, plan: Any, bench: RevivingPlanBench, best: bool = False
    ) -> None:
        """Store a plan serialized, if the plan read back computes the same.

        best: the plan is the choice for its graph, which is stored in any case
        """
        stored = self._store_blob(graph, choice, plan, bench, best)
        if best and not stored:
            self.store_choice(graph.key, choice)

    def _store_blob(self, graph: CudnnGraph, choice: Choice, plan: Any, bench: RevivingPlanBench, best: bool) -> bool:
        at = self.environment.key(graph.key, self.level) if best else self._key_of(graph.key, choice)
        known = self.plan_store.get(at)
        if known is not None and known.blob is not None and known.choice == choice:
            return True
        blob = bench.serialized(plan)
        if blob is None:
            return False
        try:
            error = 0.0 if bench.is_revived(plan) else bench.error(graph, bench.revive(graph, blob), plan)
        except ExecutionError as reason:
            warnings.warn(f"{choice.name} cannot be stored serialized: {reason}", stacklevel=4)
            return False
        if error is not None and error <= TOLERANCE:
            self._put({at: Entry(choice, blob)})
            return True
        warnings.warn(f"{choice.name} is not stored: read back, its results are off by {error}", stacklevel=4)
        return False

    def drop(self, graph: str, choice: Choice, reason: str) -> None:
        """Drop a serialized plan, but not the choice of that plan."""
        for level in (self.level, self._name(choice)):
            at = self.environment.key(graph, level)
            self._read.pop(at, None)
            self.plan_store.drop_blob(at, reason)
        entries = list(self._suggested.get(graph, ()))
        for place, entry in enumerate(entries):
            if entry.blob is not None and entry.choice.identity == choice.identity:
                warnings.warn(f"{choice.name}: cuDNN does not read its serialized plan ({reason})", stacklevel=3)
                entries[place] = replace(entry, blob=None)
        self._suggested = {**self._suggested, graph: entries}

    def store_choice(self, graph: str, choice: Choice) -> None:
        """Store the best plan of a graph."""
        at = self.environment.key(graph, self.level)
        known = self.plan_store.get(at)
        if known is None or known.choice != choice:
            self._put({at: Entry(choice)})

    def record_engines(self, chosen: Mapping[str, Choice]) -> None:
        """Record a stored plan of each engine that runs a graph, by key; the next process loads these engines early."""
        found = {choice.engine: (graph, choice) for graph, choice in chosen.items() if choice.engine != BLAS}
        if not found.keys() <= self._recorded:
            self._recorded |= found.keys()
            keys = {
                engine: (self.environment.key(graph, self.level), self._key_by_name(graph, choice))
                for engine, (graph, choice) in found.items()
            }
            load_engines.record(self.plan_store, keys)

    def product(self, graph: str) -> Choice | None:
        """Return the stored algorithm of a product that cuDNN refuses, by key of its graph. All levels share it."""
        entry = self.plan_store.get(self.environment.key(f"product {graph}", "quick"))
        return None if entry is None else entry.choice

    def store_product(self, graph: str, choice: Choice) -> None:
        """Store the fastest algorithm of a product that cuDNN refuses."""
        self._put({self.environment.key(f"product {graph}", "quick"): Entry(choice)})

    def store_received(self, entries: Mapping[str, Entry]) -> None:
        """Store plans as choices of their graphs, unless others are stored."""
        keys = {self.environment.key(graph, self.level): entry for graph, entry in entries.items()}
        self._put({key: entry for key, entry in keys.items() if self.plan_store.get(key) is None})

    def _put(self, entries: Mapping[PlanKey, Entry]) -> None:
        for key in entries:
            self._read.pop(key, None)
        self.plan_store.put_all(entries)

    def _key_of(self, graph: str, choice: Choice) -> PlanKey:
        """Return the key of the graph's choice if this is it, else the key of a plan by its name."""
        at = self.environment.key(graph, self.level)
        known = self.plan_store.get(at)
        chosen = known is not None and known.choice.identity == choice.identity
        return at if chosen else self._key_by_name(graph, choice)

    def _key_by_name(self, graph: str, choice: Choice) -> PlanKey:
        return self.environment.key(graph, self._name(choice))

    @staticmethod
    def _name(choice: Choice) -> str:
        return f"engine {choice.engine} {dict(choice.knobs)}"

    # quarantine --------------------------------------------------------------------------------------

    def quarantine_known_wrong(self, graphs: Mapping[str, CudnnGraph]) -> None:
        """Put stored or suggested plans in quarantine that `known_bugs` lists as wrong."""
        for key, graph in graphs.items():
            at = self.environment.key(key, self.level)
            known = self.plan_store.get(at)
            if known is not None:
                self._read[at] = known
            for entry in (*([known] if known is not None else []), *self._suggested.get(key, ())):
                choice = entry.choice
                reason = wrong_plan(graph, choice.engine, dict(choice.knobs))
                if reason is not None and self.quarantine_reason(key, choice) is None:
                    self.quarantine(key, choice, reason)

    def quarantine_reason(self, graph: str, choice: Choice) -> str | None:
        """Tell why a plan is in quarantine; None if it is not."""
        found = self._quarantined.get(graph)
        if found is None:
            found = self.plan_store.quarantined(graph, self.environment.target, self.environment.cudnn)
            self._quarantined[graph] = found
        return next((why for engine, knobs, why in found if (engine, knobs) == choice.identity), None)

    def quarantine(self, graph: str, choice: Choice, reason: str) -> None:
        """Put a plan in quarantine."""
        target, cudnn = self.environment.target, self.environment.cudnn
        self._quarantined.pop(graph, None)
        self.plan_store.quarantine(graph, target, cudnn, choice.engine, choice.knobs, reason)

    # steps and kernels -------------------------------------------------------------------------------

    def step_choice(self, step: str, launch_us: float) -> tuple[Part, ...] | None:
        """Return the stored choice for a step, by `step_choices.step_key`."""
        found = self.plan_store.choice(self._step_key(step, launch_us))
        try:
            return None if found is None else tuple(map(Part.from_json, found["parts"]))
        except (KeyError, TypeError, ValueError):
            return None  # stored by another version of fusec

    def store_step_choice(self, step: str, launch_us: float, choice: Sequence[Part]) -> None:
        """Store the choice for a step."""
        self.plan_store.put_choice(self._step_key(step, launch_us), {"parts": [part.to_json() for part in choice]})

    def kernel_variant(self, kernel: str) -> Mapping[str, Any]:
        """Return what was measured of a kernel's variants, by the kernel's key."""
        return self.plan_store.choice(self.environment.key(f"kernel {kernel}", self.level)) or {}

    def store_kernel_variant(self, kernel: str, measured: Mapping[str, Any]) -> None:
        """Store what was measured of a kernel's variants."""
        self.plan_store.put_choice(self.environment.key(f"kernel {kernel}", self.level), measured)

    def cubin(self, key: str) -> Entry | None:
        """Return the compiled kernel that a file or the cache has for a key of `cubins.CudaSource`."""
        known = self._known_kernels.get(key)
        return known if known is not None else self.plan_store.get(self.environment.key(key, "none"))

    def store_cubins(self, entries: Mapping[str, Entry]) -> None:
        """Store compiled kernels, by key; they are trusted."""
        self.plan_store.put_all({self.environment.key(key, "none"): entry for key, entry in entries.items()})

    def _step_key(self, step: str, launch_us: float) -> PlanKey:
        depends_on = f"{launch_us} {candidate_code_digest()} {self.environment.figures}"
        return self.environment.key(f"step {digest_of(step)} {depends_on}", self.level)


def digest_of(text: str) -> str:
    """Return a short key for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()
