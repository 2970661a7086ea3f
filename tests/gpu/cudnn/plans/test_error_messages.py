"""Test how cuDNN's nested refusals (shortened from those of 9.19) become one reason."""

from __future__ import annotations

from fusec.gpu.cudnn.plans.error_messages import MAX_REASON, reason_of


def block(engine: int, *warnings: str) -> str:
    knobs = f'{{"engineId":{engine},"smVersion":900,"knobChoices":{{"CUDNN_KNOB_TYPE_SPLIT_K_SLC":-1}}}}\n'
    return knobs + "".join(f"Warning: {w}\n" for w in warnings) + "\n"


CALLERS = (
    "CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()",
    "CUDNN_STATUS_NOT_SUPPORTED; Reason: finalize_internal()",
)
LAYOUT = 'CUDNN_STATUS_NOT_SUPPORTED_LAYOUT; Reason: get_matrix_layout(*port) != "RowMajor"'
NODE = "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN; Reason: Unsupported node in the graph.\n at: true"
OTHER = "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only supported since Blackwell"


def test_the_first_reason_of_each_engine_is_listed_and_equal_ones_are_joined() -> None:
    text = (
        block(1, LAYOUT, *CALLERS) + block(10, OTHER, *CALLERS) + block(7, LAYOUT, *CALLERS) + block(2, NODE, *CALLERS)
    )
    assert reason_of(RuntimeError("No valid engine configs\n" + text)) == (
        "CUDNN_STATUS_NOT_SUPPORTED_LAYOUT",
        'engine 1, 7: get_matrix_layout(*port) != "RowMajor"; engine 2: Unsupported node in the graph',
    )


def test_another_generation_is_a_reason_only_if_there_is_no_other() -> None:
    code, message = reason_of(RuntimeError(block(10, OTHER, *CALLERS)))
    assert code.endswith("ARCH_MISMATCH")
    assert message == "engine 10: only supported since Blackwell"


def test_descriptor_errors_give_their_condition() -> None:
    text = "detail::finalize(op.get_raw_desc()) failed with message: yDim != xDim, and code: CUDNN_STATUS_BAD_PARAM"
    assert reason_of(RuntimeError(text)) == ("CUDNN_STATUS_BAD_PARAM", "yDim != xDim")


def test_what_needs_a_device_says_so() -> None:
    code, message = reason_of(RuntimeError("plan failed cudnn_status: CUDNN_STATUS_EXECUTION_FAILED_CUDART"))
    assert code == "CUDNN_STATUS_EXECUTION_FAILED_CUDART"
    assert message.startswith("cuDNN asks for a real device here, and may accept it there")


def test_other_errors_have_the_name_of_their_type_and_long_ones_are_shortened() -> None:
    assert reason_of(ValueError("Inner dimensions\nmust match")) == ("ValueError", "Inner dimensions must match")
    assert len(reason_of(RuntimeError("x" * 5000))[1]) <= MAX_REASON
