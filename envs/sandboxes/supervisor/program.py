"""How Python source becomes ``__main__``: the same text in a new interpreter and in a forked one.

The program finds ``__main__`` empty but for what CPython puts there, ``/workspace`` first on ``sys.path``, and line
buffered output, so that what was printed before a deadline is not lost. Its tracebacks show its source lines.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import types

SOURCE_FD = 4

_BOOT = """
def _boot(source):
    import sys
    if isinstance(source, int):
        with open(source, "rb") as file:
            source = file.read()
    def hook(kind, error, trace):
        import linecache, traceback
        lines = source.decode("utf-8", "replace").splitlines(True)
        linecache.cache["program.py"] = (len(source), None, lines, "program.py")
        while trace is not None and trace.tb_frame.f_code.co_filename != "program.py":
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)
    sys.excepthook = hook
    sys.argv = ["program.py"]
    sys.stdout.reconfigure(line_buffering=True)
    main = sys.modules["__main__"].__dict__
    main.pop("_boot", None)
    main["__file__"] = "/workspace/program.py"
    exec(compile(source, "program.py", "exec", dont_inherit=True), main)
"""
_BOOT_CODE = compile(_BOOT, "<boot>", "exec")
_streams: list[io.TextIOWrapper] = []

NEW_INTERPRETER_TEXT = f"{_BOOT}\n_boot({SOURCE_FD})\n"


def run_forked(source: bytes) -> int:
    """Run the source in this freshly forked interpreter and return what the process must exit with."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.path.insert(0, "")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = _streams
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.setrecursionlimit(sys.getrecursionlimit() + _depth())
    namespace: dict[str, object] = {}
    exec(_BOOT_CODE, namespace)
    status = 0
    try:
        namespace["_boot"](source)  # type: ignore[operator]
    except SystemExit as request:
        status = _exit_status(request.code)
    except BaseException as error:  # noqa: BLE001 - whatever the program raised ends the program, as in CPython
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    return _finalize(status)


def prepare_streams() -> None:
    """Make the stream objects of every forked program once, in the supervisor, while 0, 1 and 2 are pipes as they will
    be there. A forked process pays for each page that it touches, and these are many."""
    saved = [os.dup(descriptor) for descriptor in range(3)]
    read, write = os.pipe()
    for descriptor, pipe_end in enumerate((read, write, write)):
        os.dup2(pipe_end, descriptor)
    _streams[:] = [
        _text(0, "r", "surrogateescape"),
        _text(1, "w", "surrogateescape"),
        _text(2, "w", "backslashreplace"),
    ]
    for descriptor, original in enumerate(saved):
        os.dup2(original, descriptor)
    for descriptor in (*saved, read, write):
        os.close(descriptor)


def _text(descriptor: int, mode: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, mode, closefd=False)
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=descriptor == 2)


def _depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _finalize(status: int) -> int:
    """What CPython does after the last line: wait for threads, run exit functions, flush."""
    for module, function in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if module in sys.modules:
            getattr(sys.modules[module], function)()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the program closed it
            status = status or 120
    return status
