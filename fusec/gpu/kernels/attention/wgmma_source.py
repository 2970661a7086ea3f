"""Generate the products of attention by warpgroups on Hopper, while other warps compute exponentials.

Registers hold scores, weights and sums as products of warps do.
"""

from __future__ import annotations

from fusec.gpu.kernels.attention.mma_source import PACK, WarpTiles
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, ceil_div
from fusec.system.dataclass import dataclass

MOST_STAGES = 5  # rounds whose keys and values are in shared memory
_CUDA = cuda_template(__package__, "wgmma.cuh")


@dataclass(frozen=True)
class GroupTiles(WarpTiles):
    """Keys and values in shared memory as tiles of 8 x 8, 128 bytes each, which warpgroups multiply by.

    All tiles of one octet come first. An odd number of octets of a key is padded with zeros. Values are followed by
    ones.

    A warpgroup has 64 queries. It issues the products of its next scores and of its sums together, and waits for both.
    It does not wait for other warps, except for the copies of the next round's keys and values. Shared memory holds
    up to five rounds, because copies for two rounds later must touch none that is still read.
    """

    causal: bool = False

    @property
    def weight(self) -> str:
        return f"sums[a][{self.width - 1}]"

    @property
    def query_octets(self) -> int:
        return self.depth

    @property
    def depth(self) -> int:
        """Octets of a key, padded to an even number."""
        return self.octets(1) + self.octets(1) % 2

    @property
    def width(self) -> int:
        """Octets of a value, and one of ones."""
        return self.octets(2) + 1

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, self.rounds)

    @property
    def shared_bytes(self) -> int:
        """Bytes for rounds of keys and values, and for a barrier."""
        return self._barrier + 16

    @property
    def _barrier(self) -> int:
        return self.stages * (self._size(1) + self._size(2)) * 2

    def _octet(self, operand: int) -> int:
        """Return the elements from one octet to the next."""
        return self.tiling.keys * PACK + wgmma.offset(self.octets(operand)) * PACK

    def _size(self, operand: int) -> int:
        return (self.depth if operand == 1 else self.width) * self._octet(operand)

    @property
    def holes(self) -> dict[str, Filling]:
        own: dict[str, Filling] = {
            "WARPS": self.tiling.warps,
            "WIDTH": self.width,
            "KEY_OCTETS": self.octets(1),
            "KEY_STRIDE": self.views[1].strides[2],
            "KEY_OCTET_SIZE": self._octet(1),
            "VALUE_STRIDE": self.views[2].strides[2],
            "VALUE_OCTET_SIZE": self._octet(2),
        }
        return super().holes | own

    def preamble(self) -> list[str]:
        kind = C_TYPES[self.views[0].dtype]
        return [
            *wgmma.product(kind, self.tiling.step),
            *wgmma.product(kind, self.width * 8, by_rows=True),
        ]

    def declare(self) -> list[str]:
        return _CUDA(
            "declare_group",
            **self.holes,
            BARRIER=self._barrier,
            ONES_AT=self.octets(2) * self._octet(2),
            IS_PADDED=c_bool(self.depth > self.octets(1)),
            ZEROS_AT=self.octets(1) * self._octet(1),
        )

    def loop(self, weigh: list[str]) -> list[str]:
        steps, step_bytes = self.tiling.keys // self.tiling.step, self.tiling.step * PACK * 2
        return _CUDA(
            "loop_of_groups",
            **self.holes,
            BLOCKS=ceil_div(self.views[0].shape[2], self.tiling.queries),
            IS_CAUSAL=c_bool(self.causal),
            COPY_FIRST=self._copy_round("begin", "0u"),
            COPY_SECOND=self._copy_round("second", "1u"),
            COPY_LATER=self._copy_round("last", "later"),
            FIRST_SCORES=self._issue_scores("all_keys", "0"),
            NEXT_SCORES=self._issue_scores(
                f"s + 1 < {steps} ? own_keys : next_keys", f"(s + 1) % {steps} * {step_bytes}"
            ),
            SUMS=self._issue_sums(),
            WEIGH=weigh,
            WAIT=_CUDA("wait", **self.holes),
        )

    def _copy_round(self, round: str, stage: str) -> list[str]:
        cuda = _CUDA.bind(**self.holes, AT_ROUND=round, AT_STAGE=stage)
        return cuda(
            "copy_round", COPY_KEYS=self._copy_octets(cuda, 1, "k_own"), COPY_VALUES=self._copy_octets(cuda, 2, "v_own")
        )

    def _copy_octets(self, cuda: CudaTemplate, operand: int, own: str) -> list[str]:
        octets, keys, threads = self.octets(operand), self.tiling.keys, self.tiling.threads
        together = threads // octets  # keys, or values, of which all threads together copy an octet
        lines: list[str] = []
        for first in range(0, keys, together):
            all_copy = threads % octets == 0 and first + together <= keys
            is_own = "true" if all_copy else f"{own} < {min(together, keys - first)}u"
            lines += cuda("copy_octet", IS_OWN=is_own, FIRST=first, OWN=own, STRIDE=self.views[operand].strides[2])
        return lines

    def _issue_scores(self, keys: str, offset: str) -> list[str]:
        """Issue products of queries by the keys at `offset` bytes from `keys`."""
        return [
            line
            for octet in range(0, self.depth, 2)
            for line in _CUDA(
                "issue_score",
                **self.holes,
                PRODUCT=f"ENTRY_{self.tiling.step}",
                KEYS_AT=keys,
                OFFSET=offset,
                OCTET=octet,
                OCTET_OFFSET=2 * octet * self._octet(1),
                ONTO=int(octet > 0),
            )
        ]

    def _issue_sums(self) -> list[str]:
        """Issue products of weights by the values of a step."""
        return [
            line
            for octet in range(0, self.tiling.step // 8, 2)
            for line in _CUDA("issue_sum", **self.holes, PRODUCT=f"ENTRY_{self.width * 8}_by_rows", OCTET=octet)
        ]
