"""Answer where each thing is decided in fusec, for docs/architecture.md.

Answers name files below fusec/, or from tests/ or benchmarks/ on. They become links. Keys are topics, then questions.
"""

from __future__ import annotations

QUESTIONS = {
    "Additions": {
        "Where would I add an op, a rule, a pass, a lowering, a kernel, a GPU, an ONNX op or a command?": (
            "the tables of [CONTRIBUTING.md](../CONTRIBUTING.md#where-additions-go) list the files of each"
        ),
        "Where would I add a fused op?": (
            "its meaning in a file of ops, such as ops/normalization.py; a rule that recognises it in "
            "passes/rules/norm.py or next to it; lower_cudnn.py if cuDNN runs it, `FAMILIES` in "
            "gpu/kernels/__init__.py if a kernel does. CONTRIBUTING.md lists all files"
        ),
        "Which tests would a change need?": (
            "those next to it: tests/ mirrors fusec/. [CONTRIBUTING.md](../CONTRIBUTING.md#the-ten-minute-loop) "
            "names the folders that test the whole"
        ),
    },
    "The model, and its passes": {
        "In which order do passes run, and why?": ("`PIPELINE` in passes/__init__.py"),
        "Which options does a compilation have, and where are they checked?": ("execution/compile_options.py"),
        "Who refuses an ONNX op, and says what to do instead?": (
            "frontends/onnx/tables.py lists the ops that fusec imports, frontends/onnx/advice.py gives the reason "
            "and the remedy. A known op with other attributes or types is refused by the function that imports it"
        ),
        "Which input sizes are padded, and to what?": (
            "dynamic_shapes/padding.py pads where frontends/padding_proof.py proves that results stay the same; "
            "serving/batch_sizes.py pads rows of a batch"
        ),
        "Where is a model split at a host step?": (
            "where the import of a node raises `HostValueError` (frontends/onnx/emission/host_values.py); "
            "frontends/onnx/segmented/segments.py makes the segments, segments/executable.py runs them"
        ),
        "Who chooses the memory order (NHWC or NCHW) of a value, and its precision?": (
            "passes/layout/assign_layout.py, with the orders that each op can take in "
            "passes/layout/op_layouts.py; passes/layout/precision.py adds casts"
        ),
        "Which pass adds or removes a cast?": (
            "passes/layout/precision.py adds casts at inputs and outputs. passes/cleanup/simplify.py (`_cast_nothing`) "
            "removes those to the own type and joins two in a row; passes/rules/casts.py removes those around norms; "
            "passes/layout/cast_before_copy.py moves one. A cast that stays is fused like any pointwise op"
        ),
        "Where is attention recognised?": (
            "passes/attention/recognise_attention.py where ONNX spells it as products and a softmax; "
            "passes/partition/refused_ops.py expands what nothing runs as one step"
        ),
        "Where are `If`, `Loop` and `Scan` imported?": (
            "frontends/onnx/ops/control.py; a loop whose end is computed runs on the host (segments/loops.py)"
        ),
        "Where do random numbers come from, as in dropout?": (
            "ops/random.py defines the bits by a seed and the number of the call; frontends/onnx/ops/random.py "
            "makes numbers of them"
        ),
        "What is a host step, and where does it run?": (
            "a node that needs values on the host ([host-steps.md](host-steps.md)); segments/executable.py runs "
            "it between programs"
        ),
        "Where does a detector's NonMaxSuppression run?": (
            "frontends/onnx/movement/data_dependent.py imports it as the op of ops/non_max_suppression.py, which "
            "gpu/kernels/selection/non_max_suppression.py runs on the GPU. frontends/onnx/segmented/bounded.py "
            "joins it with what follows if rows stay separate; otherwise the number of boxes goes to the host"
        ),
    },
    "Fusion": {
        "Which ops become one step?": ("passes/partition/candidates.py proposes, passes/partition/cover.py chooses"),
        "Why did an op not fuse? Who decides?": (
            "passes/partition/cover.py (`_pick`, `_decide`); cuDNN, which gpu/cudnn/legality/oracle.py asks"
        ),
        "Who words the reason why an op did not fuse?": (
            "`WITHOUT` in lower_cudnn.py for an op; passes/partition/cover.py, "
            "passes/partition/strict_rounding.py, lowering/known_bugs/graph_rules.py, and "
            "gpu/cudnn/plans/error_messages.py for cuDNN's answers. `STAGES` in diagnostics/explain/explain_program.py "
            "names who refused"
        ),
        "Who knows that cuDNN refuses a graph, such as a depthwise convolution of 8-bit integers?": (
            "no file: cuDNN is asked, and plans/verdict.py records its answer. `WITHOUT` in lower_cudnn.py and "
            "`refusal` in gpu/cudnn/legality/judges.py hold what fusec does not ask. gpu/kernels/__init__.py finds a "
            "kernel for it"
        ),
        "Where may fp32 be rounded to tf32?": (
            "`tensor_cores` in passes/base.py says if it may: in every precision but fp32. A cuDNN graph carries it "
            "(lowering/cudnn_graph.py); gpu/cudnn/plans/plan_list.py then excludes plans, gpu/cublaslt/match.py "
            "chooses the type"
        ),
        "What runs a step that neither cuDNN nor a kernel runs?": (
            "cuBLASLt, for a product (gpu/cublaslt/lone_matmul.py), by the algorithm that "
            "gpu/autotune/plans/product_selection.py chooses. Other ops run one by one by their definition in CuPy "
            "(reference.py), as execution/step_binding.py binds them"
        ),
        "When does a step move nothing, as a view?": (
            "schedule/aliasing.py tells which ops may share the memory of their operand; `single_step` in "
            "schedule/program.py makes such a step"
        ),
        "What does cuDNN compute wrongly?": ("lowering/known_bugs/graph_rules.py, lowering/known_bugs/plan_rules.py"),
        "Who consults these rules?": (
            "for graphs lower_cudnn.py, lowering/graph_builder.py, gpu/cudnn/legality/judges.py and "
            "gpu/cudnn/legality/oracle.py; for plans gpu/cudnn/plans/plan_list.py, gpu/cudnn/plans/plan_builder.py, "
            "gpu/autotune/plans/plan_bench.py and gpu/autotune/cache/tuning_cache.py"
        ),
        "In which order do steps run?": (
            "`ordered` in passes/partition/partition_graph.py: a step runs after those that it reads, and of several "
            "such steps the one that begins first in the graph runs first"
        ),
        "Where does a step get its name, such as `conv+bias+relu`?": (
            "`signature` and `display_name` in schedule/program.py"
        ),
    },
    "Plans, kernels and tuning": {
        "Does cuDNN, cuBLASLt or a kernel run a step?": (
            "gpu/autotune/candidates/step_candidates.py lists the candidates, "
            "gpu/autotune/candidates/candidate_times.py chooses by time, "
            "gpu/autotune/candidates/neighbour_times.py compares those that differ by little between the steps "
            "around them, gpu/autotune/steps/step_selection.py stores the choice. For some products of 8-bit "
            "integers a rule decides, so that cuDNN's plans are not built (gpu/known_faster_kernels.py). Without a "
            "GPU: passes/partition/cover.py, and passes/partition/partition_graph.py for what cuDNN does not run"
        ),
        "Which plan of cuDNN runs a graph?": ("gpu/autotune/plans/plan_selection.py"),
        "Which variant of a kernel runs?": ("gpu/autotune/steps/variant_selection.py"),
        "Where is split-K chosen: how many blocks share the depth of a sum?": (
            "each kernel chooses for itself: gpu/kernels/convolution/split_k.py for convolutions, "
            "gpu/kernels/product/few_rows/streamed_weights.py (`parts`) and "
            "gpu/kernels/product/packed/packed_product.py for products of few rows. In plans of cuDNN it is a "
            "knob, in cuBLASLt a part of the algorithm (gpu/cublaslt/algorithms.py); both are timed"
        ),
        "Which figures of a GPU are used? What changes with more multiprocessors?": (
            "those of the compiled target, such as targets/h200.json; gpu/kernels/codegen/gpu_figures.py reads "
            "what shapes kernels, and gpu/kernels/__init__.py hands it to each family. No other file names a "
            "number of multiprocessors. Choices of steps timed with other figures are not used"
        ),
        "How often is a plan or kernel timed, and how?": (
            "`time_last` and `ROUNDS` in gpu/autotune/plans/plan_timing.py; gpu/measure/timer.py measures, on data of "
            "gpu/measure/random_inputs.py"
        ),
        "Which results reject a plan or a kernel?": (
            "gpu/autotune/plans/plan_check.py for plans, gpu/launch/kernel_launcher.py for variants of a kernel; "
            "gpu/measure/tolerance.py is the bound"
        ),
        "When does tuning stop?": (
            "`LEVELS` and the budget in gpu/autotune/plans/plan_search.py; `SECONDS` in "
            "gpu/autotune/model/coordinate_descent.py for the whole model"
        ),
        "What does `--budget` stop?": (
            "questions to cuDNN (`within` in gpu/cudnn/legality/judges.py): what was not asked about runs unfused "
            "(passes/partition/cover.py). Timing, in gpu/autotune/plans/plan_search.py: each graph still gets a plan. "
            "gpu/backend.py bounds the search over the whole model"
        ),
        "Which plans may a compilation use: engines, workspace, fixed order of sums?": ("plans/plan_filter.py"),
        "What does `deterministic=True` change?": (
            "plans/plan_filter.py leaves out plans, passes/attention/deterministic_attention.py orders the sums of "
            "attention's gradients, and compiler/choose_target.py refuses ops whose updates a GPU adds in no fixed "
            "order"
        ),
        "What depends on the numbers of cuDNN's engines, should a release change them?": (
            "what uses plans/engine_numbers.py, and the rules of lowering/known_bugs/plan_rules.py. Stored choices and "
            "verdicts do not: their keys hold the version"
        ),
        "What is the least time of a step (roofline), and its modelled time?": ("passes/partition/cost_model.py"),
        "Which kernel runs a product, such as one of int8?": (
            "gpu/kernels/product/thin_product.py and the folders next to it; `FAMILIES` in "
            "gpu/kernels/__init__.py has the order in which they are asked"
        ),
    },
    "Caches and files": {
        "When is a choice not measured again?": (
            "gpu/autotune/cache/tuning_cache.py; gpu/shape_transfer/transfer_choices.py for other sizes"
        ),
        "Where are choices stored, and by which key?": (
            "plans/plan_cache.py; `PlanKey` in plans/plan_record.py, which "
            "gpu/autotune/cache/tuning_environment.py and gpu/autotune/cache/tuning_cache.py fill"
        ),
        "Where are cuDNN's verdicts stored, and by which key?": (
            "plans/sqlite_cache.py; gpu/cudnn/legality/verdict_keys.py"
        ),
        "Which plans and kernels of others does this machine run?": (
            "those that plans/trusted_plans.py lists; artifacts/read_file.py and gpu/launch/cubins.py ask it"
        ),
        "Where is CUDA source compiled?": (
            "gpu/launch/cubins.py compiles kernels in child processes (gpu/launch/nvrtc_process.py), gpu/nvrtc.py the "
            "others in this process, through CuPy. compiler/compile_ahead.py begins before the program is known"
        ),
        "Where is the cache folder, and how large does it get?": (
            "plans/cache_folder.py finds it. `MAX_BYTES` in plans/plan_cache.py bounds plans, `MAX_ENTRIES` in "
            "plans/sqlite_cache.py bounds verdicts, "
            "`MAX_BYTES` in program_cache/store.py programs"
        ),
        "When is a model's file not imported again?": "compiler/file_program.py looks for its program on a GPU; "
        "program_cache/key.py and program_cache/model_files.py say what it depends on",
        "What if two processes compile the same model?": (
            "cuDNN is asked about each graph once: gpu/cudnn/legality/oracle.py claims a graph by a lock of "
            "system/machine_locks.py, and others wait for the verdict. Each process times plans for itself; "
            "plans/plan_cache.py writes whole files, and the last one stays"
        ),
        "Can a later version of fusec read a `.fusec` file?": (
            "if it knows its format: `FORMAT` and the other numbers in artifacts/members.py. artifacts/read_file.py "
            "refuses others. With another cuDNN, plans are built again by engine and knobs"
        ),
        "What makes a stored choice or verdict stale?": (
            "its key. A choice depends on the graph or kernel source, the GPU, the driver, the versions of cuDNN, "
            "its frontend and cuBLASLt, the filter of plans and the level; choices of steps also on the figures "
            "of the target (gpu/autotune/cache/tuning_environment.py). A verdict depends on the graph, the target, "
            "the versions of cuDNN, its frontend and NVRTC, and fusec's rules "
            "(gpu/cudnn/legality/verdict_keys.py)"
        ),
        "How does a plan get from a machine without a GPU to one with a GPU?": (
            "compiler/build_plans.py has several plans built for each graph (gpu/cudnn/plans/plan_serialization.py), "
            "artifacts/fusec_file.py writes them into the file, and compiler/load_file.py reads it on the GPU. "
            "There gpu/autotune/plans/suggested_plans.py times them, if plans/trusted_plans.py lists them; of others "
            "only engine and knobs are used"
        ),
    },
    "Weights and quantisation": {
        "What happens to a weight?": (
            "frontends/onnx/model_file/tensors.py reads it when it is first used, frontends/onnx/emission/emit.py "
            "makes it a constant, passes/rewriting/derived_constants.py folds constants into it "
            "(passes/folding/fold_scales.py: factors), passes/layout/precision.py casts it, "
            "passes/layout/assign_layout.py orders it, execution/shared_weights.py stores it once, "
            "execution/step_binding.py uploads it, lowering/packing.py packs narrow types"
        ),
        "Where is a weight transposed, or stored in another memory order?": (
            "passes/cleanup/fold_constants.py folds a transpose of a constant. Each reader names the memory order "
            "that it wants: a cuDNN graph by `ConstantBinding` (lowering/graph_builder.py), a kernel by `Argument` "
            "(gpu/kernels/codegen/kernel.py). `Constants` in execution/step_binding.py holds one array for each "
            "order, which gpu/launch/device_constants.py arranges on the device"
        ),
        "Where are the scales of 8-bit products folded?": (
            "passes/quantization/integer_products.py folds them into one factor of the exact sums, after "
            "passes/quantization/move_scales.py moved them to its operands; passes/quantization/run_in_fp8.py "
            "does so for fp8. The factor runs in the epilogue of the product: of cuDNN (lower_cudnn.py), cuBLASLt "
            "(gpu/cublaslt/match.py) or a kernel. passes/folding/fold_scales.py folds factors of floats into "
            "weights"
        ),
        "Which layers does quantisation leave in float?": (
            "quantization/placement.py by kind, quantization/choose_float.py by their loss"
        ),
        "How is a quantised convolution compiled?": (
            "frontends/onnx/ops/quantize.py imports Q/DQ as casts and pointwise ops; "
            "passes/quantization/move_scales.py and passes/quantization/integer_products.py make an exact "
            "convolution of integers and one factor. cuDNN, gpu/kernels/convolution/resident_filters.py or "
            "gpu/kernels/product/int8/ run it; gpu/known_faster_kernels.py tells where cuDNN is not asked. "
            "compiler/faster_form.py times this form against floats with rounded weights"
        ),
    },
    "Training": {
        "Where is the gradient of an op defined?": (
            "`RULES` in gradients/__init__.py lists the rule of each op, and `STOPS` the ops without one; "
            "gradients/core.py applies them from the last node to the first"
        ),
        "Where do optimisers and state come from?": (
            "training/optimizers.py adds the arithmetic; `parameter` and `update` in builder/builder.py declare state, "
            "execution/state.py holds it on the device, and schedule/buffer_donation.py overwrites it in place"
        ),
        "How do the updates of many parameters become one launch?": (
            "schedule/multi_tensor.py groups them, gpu/kernels/elementwise/multi_tensor.py runs the group"
        ),
    },
    "A call": {
        "What does a call do?": ("runtime.py"),
        "Where is a value stored?": ("schedule/memory_plan.py; schedule/buffer_donation.py for state"),
        "Where is a CUDA graph captured, and who holds it?": (
            "execution/program_runner.py asks for it in the second call, holds it and replays it; "
            "gpu/launch/capture.py and gpu/launch/cuda_graph.py capture it"
        ),
        "Which steps run side by side, and on how many streams?": (
            "schedule/dependencies.py finds the steps that each must wait for, and assigns at most `MOST_LANES` "
            "streams; gpu/launch/cuda_graph.py captures both orders and times them"
        ),
        "Where is a launch made dependent?": (
            "`dependent` of a `Launch` (gpu/kernels/codegen/kernel.py), which each kernel sets for itself; "
            "gpu/launch/dependent_launch.py launches it so"
        ),
        "What if two threads call one executable?": (
            "they take turns ([calls.md](calls.md#how-threads-and-streams-share-an-executable)): "
            "execution/program_runner.py and gpu/launch/stream_calls.py hold locks"
        ),
        "Where does a decoder store keys and values?": (
            "generation/decoder_graph.py makes them state of two programs; execution/state.py holds state on the device"
        ),
        "Where does a decoder choose the next token?": (
            "in its program, for the best token (generation/decoder_graph.py); on the host, for a drawn one "
            "(generation/sampling.py)"
        ),
        "Who holds a plan, and who frees it?": (
            "gpu/autotune/plans/plan_selection.py holds the plans of a backend, and with it they go: Python frees "
            "gpu/cudnn/plans/built_plan.py, and gpu/cublaslt/descriptors.py its own"
        ),
    },
    "Processes": {
        "Who chooses the number of worker processes?": (
            "`most_workers` in gpu/cudnn/worker_processes/worker_pool.py, for processes that ask cuDNN or build plans: "
            "`FUSEC_WORKERS`, else the cores, at most `MAX_WORKERS`, and on a GPU as its memory allows. "
            "`most_compilers` in gpu/launch/cubins.py, for processes that compile kernels; cli/serve.py, for the front "
            "ends of the server; scale/devices.py gives each device of a pool one process"
        ),
        "Which file runs in the process that asks cuDNN?": (
            "gpu/cudnn/worker.py reads the questions; gpu/cudnn/legality/graph_check.py judges a graph, "
            "gpu/cudnn/plans/plan_builder.py builds plans. In the parent, gpu/cudnn/legality/oracle.py and "
            "gpu/cudnn/worker_processes/build_pool.py ask"
        ),
        "How does cuDNN plan on a machine without a GPU?": (
            "gpu/cudnn/without_driver/deviceless.py loads it over a stand-in for the driver "
            "(gpu/cudnn/without_driver/driver_stand_in.py), and the target describes the GPU"
        ),
    },
    "Failures": {
        "What happens when cuDNN crashes or hangs?": (
            "it runs in a process of its own: gpu/cudnn/worker_processes/worker_process.py tells how that ended, and "
            "gpu/cudnn/worker_processes/worker_pool.py starts another. On the GPU, gpu/autotune/plans/plan_timing.py "
            "puts a plan that costs the process its GPU into quarantine (plans/plan_cache.py)"
        ),
        "What happens when the GPU has no memory left?": (
            "`out_of_memory` in gpu/launch/stream_calls.py makes it an ExecutionError, in a call and while plans "
            "and kernels are timed. gpu/autotune/plans/plan_bench.py leaves out plans whose workspace does not fit"
        ),
        "What stays when a process is killed?": (
            "complete files: system/atomic_write.py writes each whole or not at all, for plans/plan_cache.py, "
            ".fusec files, locks and reports. Verdicts stay in plans/sqlite_cache.py, finished chunks of the "
            "fuzzer in testing/runner/database.py. No child process (system/parent_death.py) and no shared memory "
            "(scale/shared_block.py) stays. scale/device_pool/device_queue.py and serving/server/supervisor.py start a "
            "dead worker again"
        ),
    },
    "Serving and testing": {
        "How does the server form batches?": ("serving/server/worker/batch_queue.py"),
        "When does the server refuse a request?": (
            "serving/server/front_end/infer_handler.py, before it is read or queued; "
            "serving/server/worker/model_worker.py where it waited too long, "
            "serving/server/front_end/worker_link.py where the worker is late"
        ),
        "What does the fuzzer compare, and how close must results be?": (
            "`PROPERTIES` in testing/properties/table.py; testing/error_bounds/bounds.py bounds the difference"
        ),
        "How do tests run kernels and plans without a GPU?": (
            "tests/gpu/kernels/emulator.py compiles the CUDA C of kernels for the CPU; tests/gpu/stand_in_gpu.py and "
            "tests/gpu/stand_in_blaslt.py stand in for CuPy, cuDNN and cuBLASLt. cuDNN's verdicts are real: "
            "tests/gpu/cudnn/recorded_answers.py reads them from a file if the code that asks has not changed"
        ),
        "Which script measures a table of docs/results.md, and which writes the page?": (
            "the text of each section names the script. benchmarks/pages/results_page.py writes the page from "
            "the JSON files of benchmarks/results"
        ),
        "How is a failing graph made smaller, stored, and run again?": (
            "testing/runner/shrink.py makes it smaller, with the steps of testing/runner/simpler_graphs.py; "
            "testing/runner/crash_shrink.py does so for crashes. testing/finding_folder.py writes the folder, and "
            "testing/findings.py runs it again. Fixed ones stay in tests/regressions/test_regressions.py"
        ),
    },
}
