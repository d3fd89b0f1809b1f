"""A program that goes too far is stopped, and its cell serves the next one."""

from __future__ import annotations

import pytest

from palaestra.envs.sandboxes import Python, Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def still_works(sandbox: Sandbox) -> bool:
    return (await sandbox.run(Python("print('alive')", "fork"), timeout_s=10)).stdout == b"alive\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal\n[signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]\nwhile True: pass",
        "import os\nos.kill(os.getpid(), 19)",
        "import sys\nsys.stdin.read()\nimport threading\nthreading.Event().wait()",
    ],
    ids=["busy loop", "sleep", "ignored signals", "stopped", "waiting"],
)
async def test_the_deadline_ends_whatever_runs(sandbox: Sandbox, code: str) -> None:
    result = await sandbox.run(Python(code, "fork"), timeout_s=0.4)
    assert (result.timed_out, result.killed_by, result.exit_code) == (True, "deadline", None)
    assert await still_works(sandbox)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_an_output_flood_is_stopped(sandbox: Sandbox, stream: str) -> None:
    result = await sandbox.run(Python(f"import sys\nwhile True: sys.{stream}.write('y' * 65536)", "fork"), timeout_s=30)
    assert (result.killed_by, result.timed_out) == ("output", False)
    assert len(getattr(result, stream)) == 64 * 1024
    assert getattr(result, f"{stream}_dropped_bytes") > 1 << 20
    assert await still_works(sandbox)


async def test_two_hundred_kilobytes_on_each_stream_are_no_flood(sandbox: Sandbox) -> None:
    code = "import sys\nfor i in range(200):\n    sys.stdout.write('o' * 1000)\n    sys.stderr.write('e' * 1000)"
    result = await sandbox.run(Python(code, "fork"), timeout_s=10)
    assert result.ok
    assert len(result.stdout) + result.stdout_dropped_bytes == 200_000
    assert len(result.stderr) + result.stderr_dropped_bytes == 200_000


async def test_memory_beyond_the_limit_is_a_memory_error(sandbox: Sandbox) -> None:
    result = await sandbox.run(Python("x = []\nwhile True: x.append(bytearray(8 << 20))", "fork"), timeout_s=20)
    assert "MemoryError" in result.stderr_text
    assert result.peak_memory_mib < 256
    assert await still_works(sandbox)


async def test_a_fork_bomb_stops_at_the_process_limit_and_leaves_nothing(sandbox: Sandbox) -> None:
    code = (
        "import os, time\n"
        "made = 0\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(100)\n"
        "    except OSError: break\n"
        "    made += 1\n"
        "print(made)"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=20)
    assert result.stdout == b"31\n"  # with the program itself 32 processes
    assert result.orphans_killed == 31
    assert await still_works(sandbox)


async def test_a_recursive_fork_bomb_ends_at_the_deadline(sandbox: Sandbox) -> None:
    result = await sandbox.run(
        Python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "fork"), timeout_s=1
    )
    assert result.timed_out
    assert await still_works(sandbox)


async def test_a_program_that_takes_its_own_output_back_gains_nothing(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nmine = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n"
        "end = time.monotonic() + 1\nwhile time.monotonic() < end:\n  os.write(1, b'x')\n"
        "  try: os.read(mine, 1)\n  except BlockingIOError: pass\nos.write(2, b'done')"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=20)
    assert (result.killed_by, result.exit_code, result.stderr) == (None, 0, b"done")
    assert await still_works(sandbox)


async def test_a_file_cannot_grow_beyond_its_limit(sandbox: Sandbox) -> None:
    code = (
        "f = open('big', 'wb', buffering=0)\nn = 0\n"
        "try:\n  while True: n += f.write(b'x' * 65536)\nexcept OSError as e: print(n, e)"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=10)
    assert result.stdout_text.startswith(f"{4 << 20} ")
    assert "File too large" in result.stdout_text


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_files_together_cannot_grow_beyond_the_size_of_their_file_system(sandbox: Sandbox, folder: str) -> None:
    code = (
        f"n = 0\ntry:\n  for i in range(100):\n    with open(f'{folder}/f{{i}}', 'wb', buffering=0) as f:\n"
        "      for _ in range(3): n += f.write(b'x' * (1 << 20))\nexcept OSError as e: print(n >> 20, e)"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=10)
    assert result.stdout_text.startswith(("15 ", "16 "))
    assert "No space left" in result.stdout_text


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_the_number_of_files_is_limited(sandbox: Sandbox, folder: str) -> None:
    code = (
        f"n = 0\ntry:\n  while True:\n    open(f'{folder}/i{{n}}', 'w').close(); n += 1\n"
        "except OSError as e: print(n, e)"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=10)
    made, _, problem = result.stdout_text.partition(" ")
    assert 900 <= int(made) <= 1000
    assert "No space left" in problem


async def test_open_files_are_limited(sandbox: Sandbox) -> None:
    result = await sandbox.run(Python("f = []\nwhile True: f.append(open('/dev/null'))", "fork"), timeout_s=10)
    assert "Too many open files" in result.stderr_text


async def test_no_core_is_dumped(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("ulimit -c; cd /workspace; python3 -c 'import os; os.abort()'; ls"), timeout_s=10)
    assert result.stdout == b"0\n"


@pytest.mark.parametrize(
    "code",
    [
        "(setsid sleep 300 &)",
        "nohup sleep 300 >/dev/null 2>&1 &",
        'python3 -c \'import os; os.fork() or (os.setsid(), os.fork() or os.execlp(*["sleep"] * 2, "300"))\'',
    ],
    ids=["setsid", "nohup", "double fork"],
)
async def test_daemons_die_with_their_command(sandbox: Sandbox, code: str) -> None:
    result = await sandbox.run(Shell(code + "\nsleep 0.1; echo done"), timeout_s=10)
    assert result.stdout == b"done\n"
    assert result.orphans_killed == 1
    left = await sandbox.run(
        Python("import os\nprint(sum(n.isdigit() for n in os.listdir('/proc')))", "fork"), timeout_s=5
    )
    assert left.stdout == b"1\n"


async def test_a_grandchild_that_holds_the_pipes_does_not_delay_the_return(sandbox: Sandbox) -> None:
    result = await sandbox.run(Shell("sleep 300 & echo started"), timeout_s=60)
    assert (result.stdout, result.timed_out, result.orphans_killed) == (b"started\n", False, 1)
    assert result.wall_s < 30


async def test_five_hundred_background_jobs_do_not_use_up_the_processes(sandbox: Sandbox) -> None:
    code = (
        "import os, time\n"
        "def fork():\n"
        "    while True:\n"
        "        try: return os.fork()\n"
        "        except BlockingIOError: time.sleep(0.005)\n"  # too many run at this moment
        "for _ in range(500):\n"
        "    pid = fork()\n"
        "    if pid == 0: fork(); os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "while len([name for name in os.listdir('/proc') if name.isdigit()]) > 1: time.sleep(0.01)"
    )
    result = await sandbox.run(Python(code, "fork"), timeout_s=60)
    assert (result.exit_code, result.stderr, result.orphans_killed) == (0, b"", 0)


async def test_cpu_seconds_of_children_and_orphans_are_counted(sandbox: Sandbox) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    result = await sandbox.run(Shell(f"python3 -c '{burn}'"), timeout_s=30)
    assert result.cpu_s >= 0.3


@pytest.mark.parametrize("end", ["", "sleep 300"], ids=["ended before the command", "killed after it"])
async def test_cpu_seconds_and_memory_of_processes_without_a_parent_are_counted(sandbox: Sandbox, end: str) -> None:
    code = "import time\nx = b'1' * (90 << 20)\nwhile time.process_time() < 0.3: pass\nopen('done', 'w')"
    command = f'(python3 -c "{code}" && exec {end or "true"} &); until [ -e done ]; do sleep 0.02; done; sleep 0.1'
    result = await sandbox.run(Shell(command), timeout_s=60)
    assert (result.exit_code, result.orphans_killed) == (0, 1 if end else 0)
    assert result.cpu_s >= 0.3
    assert 90 <= result.peak_memory_mib < 200
