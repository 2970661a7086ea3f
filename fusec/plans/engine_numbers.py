"""Name the cuDNN engines that fusec treats in a way of their own, by the numbers that cuDNN 9.19 gives them on an H200.

Plans are stored by engine number, but a key has cuDNN's version, so another release is asked anew. Rules for engines
that compute a graph wrongly are in `lowering/known_bugs/plan_rules.py`.
"""

from __future__ import annotations

# Precompiled, and offered for relu6, sigmoid, tanh and elu after a bias. It is slower than the runtime-compiled engines
# that are offered with it.
GENERIC = 0
# Takes several times as long to compile as others of its list, for convolutions of 8-bit integers.
SLOW_BUILD_OF_INTEGERS = 2
# Offered without a device, but not built without one, not even when named.
DEVICE_ONLY = frozenset({4, 53})
PYTHON_ENGINES = 10_000  # engines from this number on belong to the frontend, not to the library
