"""Test the worked example of docs/serving.md, run as it is written."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
from pathlib import Path

import pytest
from cli.command import fusec, tiny
from serving.running import serving

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]
PAGE = Path(__file__).parent.parent.parent / "docs" / "serving.md"


@pytest.mark.slow
def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    part = text[text.index("## In five minutes") : text.index("## `fusec.Predictor`")]
    ((compiling, serve, told),) = re.findall(
        r"```\n\$ fusec (compile .*)\n\$ fusec (serve .*)\n(serving .*)\n```", part
    )
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert fusec(*shlex.split(compiling)).exit_code == 0
    assert told == "serving tiny on http://127.0.0.1:8000"
    with serving(*shlex.split(serve.removesuffix(" --port 8000"))[1:], "--front-ends", 1) as server:
        blocks = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        assert len(blocks) == 2
        for block in blocks:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block.replace("localhost:8000", server.address), str(PAGE), "exec"), {})
            expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
            assert said.getvalue().splitlines() == expected
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130
    exported = re.findall(r"\$ fusec (export-triton .*)\n((?:wrote .*\n)+)```", text)
    ((command, lines),) = exported
    result = fusec(*shlex.split(command))
    assert (result.exit_code, result.stdout) == (0, lines)
