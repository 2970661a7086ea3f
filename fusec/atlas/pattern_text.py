"""Write the graph of a pattern in text form, one line for each word."""

from __future__ import annotations

from fusec.atlas.pattern_words import ANCHORS, BINARY, CASTS, REDUCTIONS, UNARY, Anchor, Shape

# Memory orders with channels innermost, by rank.
_CHANNELS_LAST = {3: "{0,2,1}", 4: "{0,2,3,1}", 5: "{0,2,3,4,1}"}


def text_of(words: str, dtype: str, channels_last: bool = True) -> str:
    """Return the graph of a pattern such as `conv bias relu`; one of the words is an anchor.

    dtype: element type of the first operand, such as `f16`
    channels_last: images have their channels innermost in memory
    """
    parts = words.split()
    anchor = ANCHORS[next(word for word in parts if word in ANCHORS)]
    is_image = anchor.op.startswith(("conv", "instance")) or len(anchor.reads) > 3
    graph = _Writer(dtype, anchor.reads, is_image, channels_last)
    for word in parts:
        graph.add(word)
    return graph.text()


class _Writer:
    """Writes lines; each reads the value of the line before."""

    def __init__(self, dtype: str, shape: Shape, is_image: bool, channels_last: bool):
        self.dtype, self.shape = dtype, shape
        self.is_image, self.channels_last = is_image, channels_last
        self.value = "%x"
        self.inputs = [f"%x: {self.type(shape)}"]
        self.lines: list[str] = []

    def type(self, shape: Shape, order: str | None = None) -> str:
        if order is None:
            order = _CHANNELS_LAST.get(len(shape), "") if self.is_image and self.channels_last else ""
        return f"{self.dtype}[{','.join(map(str, shape))}]{order}"

    def add(self, word: str) -> None:
        if word in ANCHORS:
            self.anchor(ANCHORS[word])
        elif word in UNARY:
            op, attributes = UNARY[word]
            self.line(op, attributes=attributes)
        elif word in CASTS:
            self.dtype = CASTS[word]
            self.line("cast", attributes=f"{{to={self.dtype}}}")
        elif word in REDUCTIONS:
            self.reduction(*REDUCTIONS[word])
        else:
            op, holds = BINARY[word]
            self.line(op, self.number() if holds == "number" else self.operand(self.second(holds)))

    def anchor(self, anchor: Anchor) -> None:
        if not anchor.op:
            return
        others = [self.operand(shape, anchor.order) for shape in anchor.others]
        if self.dtype == "i8":
            self.dtype = "i32"  # sums of products of 8-bit integers
        self.line(anchor.op, *others, attributes=anchor.attributes, shape=anchor.gives)

    def reduction(self, kind: str, keeps_channel: bool) -> None:
        channel = 1 if self.is_image else len(self.shape) - 1
        axes = [axis for axis in range(len(self.shape)) if (axis != channel) == keeps_channel]
        left = tuple(1 if axis in axes else size for axis, size in enumerate(self.shape))
        self.line("reduce", attributes=f'{{kind="{kind}", axes={axes}, keepdims=true}}', shape=left)

    def line(self, op: str, *operands: str, attributes: str = "", shape: Shape = ()) -> None:
        self.shape = shape or self.shape
        name = f"%v{len(self.lines)}"
        self.lines.append(
            f"  {name} = {op}({', '.join((self.value, *operands))}) {attributes}: {self.type(self.shape)}"
        )
        self.value = name

    def operand(self, shape: Shape, order: str | None = None) -> str:
        name = f"%p{len(self.inputs)}"
        self.inputs.append(f"{name}: {self.type(shape, order)}")
        return name

    def number(self) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"  {name} = constant [0.5] : {self.dtype}[1]")
        return name

    def second(self, holds: str) -> Shape:
        """Return the shape of a second operand."""
        if holds == "element":
            return self.shape
        if not self.is_image:
            return (self.shape[-1],) if holds == "channel" else (*self.shape[:-1], 1)
        batch = 1 if holds == "channel" else self.shape[0]
        return (batch, self.shape[1], *[1] * (len(self.shape) - 2))

    def text(self) -> str:
        head = f'graph "pattern" ({", ".join(self.inputs)}) {{'
        return "\n".join((head, *self.lines, f"  return {self.value}", "}", ""))
