"""Cells and containers a second beside raw ``crun run``, and a step beside ``podman exec``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _sandboxes.rates import per_s
from _sandboxes.run import CORES, LINE, Figures, Run, percentile, ratio, run_line, timed
from palaestra.envs.sandboxes import Sandbox, open_pool
from palaestra.envs.sandboxes.podman.backend import PodmanHost
from palaestra.envs.sandboxes.podman.service import environment

_DEADLINE_S = 300
_AT_ONCE = 8
"""Steps, and calls of ``podman exec``, that are under way together."""
_CRUN = """
import subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
crun, folder, count, at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def one(number):
    command = [crun, "--cgroup-manager=disabled", "--root", folder + "/state", "run", "--bundle", folder, f"c{number}"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if done.stdout != b"42\\n":
        sys.exit(f"crun: {done.stderr.decode()}")
one(count)
started = time.perf_counter()
with ThreadPoolExecutor(at_once) as threads:
    list(threads.map(one, range(count)))
print(count / (time.perf_counter() - started))
"""


async def rates(run: Run) -> Figures:
    """Cells (many to a container), containers (a cell each), and raw crun, each at its best on all cores."""
    count = run.count(300, 30)
    before = await asyncio.to_thread(crun_per_s, run, count)
    async with await open_pool(backend=run.backend) as pool:

        async def cell(worker: int) -> None:
            await (await pool.acquire()).close()

        cells = await per_s(cell, run.seconds(5))
    between = await asyncio.to_thread(crun_per_s, run, count)
    wanted = run.count(40, 6)
    async with await open_pool(backend=run.backend, cells_per_host=1) as pool:
        started = time.perf_counter()  # the pool has one host by now
        await asyncio.gather(*(pool.acquire() for _ in range(wanted + 1)))
        containers = wanted / (time.perf_counter() - started)
    after = await asyncio.to_thread(crun_per_s, run, count)
    crun = None if before is None or between is None or after is None else (before + between + after) / 3
    return {
        "cells_per_s": cells,
        "containers_per_s": containers,
        "crun_per_s": crun,
        "cells_vs_crun": ratio(cells, crun),
        "containers_vs_crun": ratio(containers, crun),
    }


def crun_per_s(run: Run, count: int) -> float | None:
    """Containers a second of a minimal bundle that prints a line, with namespaces and nothing else; in the user
    namespace that rootless Podman uses, or as root."""
    names = ("crun_per_s", "cells_vs_crun", "containers_vs_crun")
    crun, podman = shutil.which("crun"), shutil.which("podman")
    if crun is None or (podman is None and os.getuid() != 0):
        run.missing("there is no crun" if crun is None else "crun needs a user namespace; there is no podman", *names)
        return None
    prefix = [] if os.getuid() == 0 else [str(podman), "unshare"]
    with tempfile.TemporaryDirectory(prefix="palaestra-crun-") as folder:
        _write_bundle(Path(folder))
        command = [*prefix, sys.executable, "-I", "-c", _CRUN, crun, folder, str(count), str(CORES)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=_DEADLINE_S)
    if done.returncode != 0:
        run.missing(f"crun does not run here: {done.stderr.strip()[-300:]}", *names)
        return None
    return float(done.stdout)


def _write_bundle(folder: Path) -> None:
    root = folder / "root"
    root.mkdir()
    mounts: list[dict[str, object]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts.append({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]})
    for name in ("usr", "bin", "lib", "lib64"):
        if Path("/", name).exists():
            source = os.path.realpath(f"/{name}")
            mounts.append({"destination": f"/{name}", "type": "bind", "source": source, "options": ["rbind", "ro"]})
    for mount in mounts:
        (root / str(mount["destination"]).lstrip("/")).mkdir()
    process = {"user": {"uid": 0, "gid": 0}, "args": ["/bin/echo", "42"], "env": ["PATH=/usr/bin:/bin"], "cwd": "/"}
    config = {
        "ociVersion": "1.0.2",
        "process": {**process, "terminal": False, "noNewPrivileges": True, "capabilities": {}},
        "root": {"path": "root", "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]},
    }
    (folder / "config.json").write_text(json.dumps(config))


async def exec_beside_step(run: Run) -> Figures:
    """Steps a second beside ``podman exec`` of the same line in the same container, as many at a time of each."""
    async with await open_pool(backend=run.backend) as pool:
        host = pool.hosts[0]
        if not isinstance(host, PodmanHost):
            return run.missing(
                "bubblewrap has no exec; use --backend podman", "exec_vs_step", "exec_per_s", "exec_ms_p50"
            )
        command = ["podman", "exec", host.name, "python3", "-s", "-B", "-c", LINE]

        async def execute() -> None:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment()
            )
            async with asyncio.timeout(_DEADLINE_S):
                stdout, _ = await process.communicate()
            if stdout != b"42\n":
                raise RuntimeError(f"podman exec printed {stdout!r}")

        cells: list[Sandbox] = [await pool.acquire() for _ in range(_AT_ONCE)]
        seconds = run.seconds(5)
        alone = await timed(execute, run.count(30, 5))
        before = await per_s(lambda worker: run_line(cells[worker]), seconds, _AT_ONCE)
        execs = await per_s(lambda _: execute(), seconds, _AT_ONCE)
        after = await per_s(lambda worker: run_line(cells[worker]), seconds, _AT_ONCE)
    steps = (before + after) / 2
    return {
        "exec_ms_p50": percentile(alone, 0.5),
        "exec_per_s": execs,
        "step_beside_exec_per_s": steps,
        "exec_vs_step": steps / execs,
    }
