"""Run `fusec verify`: check a compilation against the reference."""

from __future__ import annotations

from fusec.cli.common import output
from fusec.cli.common.options import AsJson, Seed, Target
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError

# Imports that only a command needs are inside it: see commands.py.


@compiles("rounding", "tune", "budget")
def verify(request: Request, target: Target = "auto", seed: Seed = 0, as_json: AsJson = False) -> None:
    """Check passes and partitions against the reference on random inputs.

    The steps run on this machine's GPU if that is the target, else the lowered graphs run in simulation.
    """
    from fusec import driver
    from fusec.diagnostics import verify as verifying
    from fusec.errors import NotOneProgramError
    from fusec.gpu import device

    with output.progress() as report:
        executable, compiled = None, None
        if device.is_present(driver.resolve_target(target)):
            executable = request.executable(target, report)
        else:
            try:
                compiled = request.build(target, report)
            except NotOneProgramError:
                executable = request.executable(target, report)

        def progress(steps: int, total: int) -> None:
            report("verify", steps, total)

        if compiled is not None:
            result, about = verifying.verify(compiled, seed, progress=progress), compiled
        else:
            assert executable is not None
            result, about = executable.verify(seed, progress), executable
    head = {"model": request.model, "target": driver.resolve_target(target).name, "cudnn_asked": about.asked}
    output.say(output.json_text({**head, **result.to_json()}) if as_json else result)
    output.print_note("" if as_json else about.note)
    if not result.ok:
        bad = sum(not check.ok for check in result.checks)
        raise CheckError(f"{request.model}: {bad} of {len(result.checks)} checks failed")
