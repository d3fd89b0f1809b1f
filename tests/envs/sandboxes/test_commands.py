"""What a command is given and what comes back of it."""

from __future__ import annotations

import hashlib
from typing import Literal

import pytest

from palaestra.envs.errors import CellFull, UsageError
from palaestra.envs.sandboxes import Argv, Python, Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")
Interpreter = Literal["new", "fork"]
both_interpreters = pytest.mark.parametrize("interpreter", ["new", "fork"])


async def test_stdout_stderr_and_exit_code_are_kept_apart(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("echo out; echo err >&2; exit 7"), timeout_s=5)
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out\n", b"err\n", 7, None)
    assert not result.ok
    assert result.wall_s > 0
    assert result.peak_memory_mib > 0


async def test_any_bytes_pass_through_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 3
    result = await sandbox.run(Argv(("cat",)), stdin=data, timeout_s=5)
    assert result.stdout == data


async def test_stdin_larger_than_the_memory_of_the_cell_is_fed_while_the_program_writes(sandbox: Sandbox) -> None:
    data = b"0123456789abcde\n" * (20 << 16)  # 20 MiB
    times = 13  # of 256 MiB that a program may hold
    code = (
        "import sys, hashlib\nsys.stderr.write('x' * 200000)\ndigest = hashlib.sha256()\n"
        "while chunk := sys.stdin.buffer.read(1 << 20): digest.update(chunk)\nprint(digest.hexdigest())"
    )
    result = await sandbox.run(Python(code, "fork"), stdin=data * times, timeout_s=60)
    assert result.stdout_text.strip() == hashlib.sha256(data * times).hexdigest()
    assert len(result.stderr) + result.stderr_dropped_bytes == 200_000


@pytest.mark.parametrize(
    "command",
    ["true", "exec <&-; sleep 0.2", "head -c 100000 >/dev/null", "sleep 0.2", "kill -9 $$", "(sleep 300 <&0 &)"],
)
async def test_a_program_that_leaves_stdin_unread_is_not_held_up_nor_is_the_next(
    sandbox: Sandbox, command: str
) -> None:
    result = await sandbox.run(Shell(command), stdin=b"x" * (5 << 20), timeout_s=60)
    assert not result.timed_out
    assert (await sandbox.run(Argv(("cat",)), stdin=b"mine", timeout_s=10)).stdout == b"mine"


async def test_stdin_that_nobody_reads_before_the_deadline_is_passed_over(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("sleep 300"), stdin=b"x" * (5 << 20), timeout_s=0.5)
    assert result.timed_out
    assert (await sandbox.run(Argv(("cat",)), stdin=b"mine", timeout_s=10)).stdout == b"mine"


async def test_an_unknown_program_is_the_agents_mistake_not_ours(sandbox: Sandbox) -> None:
    result = await sandbox.run(Argv(("no-such-program",)), timeout_s=5)
    assert result.exit_code == 127
    assert "no-such-program: not found" in result.stderr_text


async def test_a_signal_is_reported_as_such(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("kill -TERM $$"), timeout_s=5)
    assert (result.exit_code, result.signal, result.killed_by) == (None, 15, None)


async def test_environment_variables_reach_the_program_and_ours_do_not(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNER_SECRET", "hunter2")
    result = await sandbox.run(Shell("env"), env={"GREETING": "hello"}, timeout_s=5)
    assert "GREETING=hello\n" in result.stdout_text
    assert "OWNER_SECRET" not in result.stdout_text


async def test_the_result_channel_is_apart_from_stdout_and_capped(sandbox: Sandbox) -> None:
    code = "import os\nprint('noise')\nos.write(3, b'r' * 3000)"
    result = await sandbox.run(Python(code), result_kib=1, timeout_s=5)
    assert (result.stdout, result.result, result.result_truncated) == (b"noise\n", b"r" * 1024, True)


async def test_no_result_channel_is_open_unless_it_is_asked_for(sandbox: Sandbox) -> None:
    result = await sandbox.run(Python("import os\nos.write(3, b'x')"), timeout_s=5)
    assert "Bad file descriptor" in result.stderr_text


async def test_the_middle_of_a_long_output_is_cut_out_and_counted(sandbox: Sandbox) -> None:
    code = "print('first')\nfor i in range(30000): print(i)\nprint('last')"
    result = await sandbox.run(Python(code, "fork"), timeout_s=10)
    written = len("first\nlast\n") + sum(len(f"{i}\n") for i in range(30000))
    assert result.stdout.startswith(b"first\n0\n1\n")
    assert result.stdout.endswith(b"29999\nlast\n")
    assert len(result.stdout) + result.stdout_dropped_bytes == written
    assert f"{result.stdout_dropped_bytes} bytes not shown" in result.stdout_text


@both_interpreters
async def test_python_runs_as_main_with_a_clean_namespace(sandbox: Sandbox, interpreter: Interpreter) -> None:
    code = (
        "import sys, os\n"
        "print(sorted(set(globals()) - {'__annotations__'}), __name__, sys.argv, os.getcwd())\n"
        "print(sys.modules['__main__'].__dict__ is globals(), [m for m in sys.modules if 'palaestra' in m])"
    )
    result = await sandbox.run(Python(code, interpreter), timeout_s=5)
    expected = ["__builtins__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__", "os", "sys"]
    assert result.stdout_text == f"{expected} __main__ ['program.py'] /workspace\nTrue []\n"


@both_interpreters
async def test_a_traceback_shows_the_programs_own_lines_and_no_others(
    sandbox: Sandbox, interpreter: Interpreter
) -> None:
    result = await sandbox.run(Python("def f():\n    return [][3]\n\nf()\n", interpreter), timeout_s=5)
    assert result.exit_code == 1
    lines = result.stderr_text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines if "File" in line] == [
        'File "program.py", line 4, in <module>',
        'File "program.py", line 2, in f',
    ]
    assert "    return [][3]" in lines
    assert lines[-1] == "IndexError: list index out of range"


@both_interpreters
async def test_a_syntax_error_points_at_its_line(sandbox: Sandbox, interpreter: Interpreter) -> None:
    result = await sandbox.run(Python("x = 1\nif x ==:\n    pass\n", interpreter), timeout_s=5)
    assert result.exit_code == 1
    assert result.stderr_text.splitlines()[0].strip() == 'File "program.py", line 2'
    assert result.stderr_text.splitlines()[-1].startswith("SyntaxError")


@both_interpreters
@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [("raise SystemExit", 0, ""), ("import sys\nsys.exit(3)", 3, ""), ("raise SystemExit('bye')", 1, "bye\n")],
)
async def test_system_exit_is_honoured(
    sandbox: Sandbox, interpreter: Interpreter, code: str, exit_code: int, stderr: str
) -> None:
    result = await sandbox.run(Python(code, interpreter), timeout_s=5)
    assert (result.exit_code, result.stderr_text) == (exit_code, stderr)


@both_interpreters
async def test_exit_functions_run_and_threads_are_waited_for(sandbox: Sandbox, interpreter: Interpreter) -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
    )
    result = await sandbox.run(Python(code, interpreter), timeout_s=5)
    assert (result.stdout, result.exit_code) == (b"thread\natexit\n", 0)


@both_interpreters
async def test_what_was_printed_before_the_deadline_is_not_lost(sandbox: Sandbox, interpreter: Interpreter) -> None:
    result = await sandbox.run(Python("print('progress')\nwhile True: pass", interpreter), timeout_s=0.7)
    assert (result.stdout, result.timed_out) == (b"progress\n", True)


@both_interpreters
async def test_modules_of_the_workspace_can_be_imported(sandbox: Sandbox, interpreter: Interpreter) -> None:
    await sandbox.write({"solution.py": b"def answer(): return 42\n"})
    result = await sandbox.run(Python("import solution\nprint(solution.answer())", interpreter), timeout_s=5)
    assert result.stdout == b"42\n"


@both_interpreters
async def test_sets_iterate_in_the_same_order_in_every_run(sandbox: Sandbox, interpreter: Interpreter) -> None:
    code = "print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('palaestra'))"
    other: Interpreter = "new" if interpreter == "fork" else "fork"
    outputs = {(await sandbox.run(Python(code, which), timeout_s=5)).stdout for which in (interpreter, other)}
    assert len(outputs) == 1


async def test_a_forked_run_leaves_nothing_in_the_next_ones_interpreter(sandbox: Sandbox) -> None:
    await sandbox.run(Python("import builtins, json\nbuiltins.leak = 1\njson.leak = 1", "fork"), timeout_s=5)
    result = await sandbox.run(
        Python("import builtins, json\nprint(hasattr(builtins, 'leak'), hasattr(json, 'leak'))", "fork"), timeout_s=5
    )
    assert result.stdout == b"False False\n"


async def test_a_request_that_makes_no_sense_is_refused_before_anything_runs(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        await sandbox.run(Argv(("true",)), timeout_s=0)
    with pytest.raises(UsageError, match="program name"):
        await sandbox.run(Argv(()), timeout_s=1)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 86_401.0, 1e300])
async def test_a_timeout_that_no_clock_can_keep_is_refused_and_the_cell_stays_whole(
    sandbox: Sandbox, timeout_s: float
) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        await sandbox.run(Shell("true"), timeout_s=timeout_s)
    assert (await sandbox.run(Shell("echo whole"), timeout_s=86_400.0)).stdout == b"whole\n"


async def test_a_command_too_long_for_a_frame_is_one_that_cannot_be_started(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("#" * (5 << 20)), timeout_s=5)
    assert (result.exit_code, result.killed_by) == (126, None)
    assert "too long" in result.stderr_text
    with pytest.raises(CellFull, match="too long"):
        await sandbox.write({"n" * (5 << 20): b""})
    assert (await sandbox.run(Shell("echo well"), timeout_s=5)).stdout == b"well\n"
