"""Makes a dynamic executable independent of the machine's loader and library folders.

An ELF program names its loader by an absolute path, and finds its libraries through that loader's configuration; in a
container image neither need exist. ``relocated`` gives the program a loader and a library folder of its own. The new
text needs more room than the old, so a segment is appended, and a note (which nothing reads at run time) gives up its
program header for it. Format: System V ABI, chapters 4 and 5; 64-bit little-endian only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

_LOAD, _DYNAMIC, _INTERPRETER, _NOTE = 1, 2, 3, 4
_READ_WRITE = 6
_DT_NULL, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 0, 5, 10, 15, 29
_IDENTITY = b"\x7fELF\x02\x01"
_DYNAMIC_ENTRY = struct.Struct("<qQ")
_HEADER = struct.Struct("<IIQQQQQQ")


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_bytes: int
    memory_bytes: int
    alignment: int

    def pack(self) -> bytes:
        return _HEADER.pack(
            self.kind,
            self.flags,
            self.offset,
            self.address,
            self.physical,
            self.file_bytes,
            self.memory_bytes,
            self.alignment,
        )


def loader_of(program: bytes) -> str:
    """The path of the loader that the program asks for. Raises ValueError for anything but a dynamic executable."""
    segment = _only(_segments(program), _INTERPRETER)
    return program[segment.offset : segment.offset + segment.file_bytes].rstrip(b"\0").decode()


def relocated(program: bytes, loader: str, library_folder: str) -> bytes:
    """The same program, started by ``loader``, with ``library_folder`` searched before anything else, for itself and
    for every library that brings no search path of its own. Raises ValueError where that cannot be done."""
    segments = _segments(program)
    dynamic = _only(segments, _DYNAMIC)
    entries = _entries(program[dynamic.offset : dynamic.offset + dynamic.file_bytes])
    values = dict(entries)
    strings_at = _file_offset(segments, values[_DT_STRTAB])
    strings = program[strings_at : strings_at + values[_DT_STRSZ]]

    loads = [segment for segment in segments if segment.kind == _LOAD]
    alignment = max(segment.alignment for segment in loads)
    offset = _round_up(len(program), alignment)
    address = _round_up(max(segment.address + segment.memory_bytes for segment in loads), alignment)
    kept = [entry for entry in entries if entry[0] not in (_DT_NULL, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH)]
    table_bytes = _DYNAMIC_ENTRY.size * (len(kept) + 4)
    new_strings = strings + library_folder.encode() + b"\0"
    kept += [(_DT_STRTAB, address + table_bytes), (_DT_STRSZ, len(new_strings)), (_DT_RPATH, len(strings)), (0, 0)]
    table = b"".join(_DYNAMIC_ENTRY.pack(*entry) for entry in kept)
    blob = table + new_strings + loader.encode() + b"\0"

    appended = _Segment(_LOAD, _READ_WRITE, offset, address, address, len(blob), len(blob), alignment)
    at = table_bytes + len(new_strings)
    headers = []
    for segment in segments:
        if segment.kind == _DYNAMIC:
            headers.append(_moved(segment, appended, 0, table_bytes))
        elif segment.kind == _INTERPRETER:
            headers.append(_moved(segment, appended, at, len(blob) - at))
        else:
            headers.append(segment)
    notes = [index for index, segment in enumerate(headers) if segment.kind == _NOTE]
    if not notes:
        raise ValueError("no program header can be spared")
    del headers[notes[-1]]
    last_load = max(index for index, segment in enumerate(headers) if segment.kind == _LOAD)
    headers.insert(last_load + 1, appended)  # the kernel wants these in the order of their addresses
    start, size = _header_table(program)[0], _HEADER.size * len(headers)
    body = program[:start] + b"".join(segment.pack() for segment in headers) + program[start + size :]
    return body.ljust(offset, b"\0") + blob


def _header_table(program: bytes) -> tuple[int, int]:
    """Offset and number of the program headers."""
    if program[: len(_IDENTITY)] != _IDENTITY:
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    if size != _HEADER.size:
        raise ValueError(f"program headers of {size} bytes")
    return start, count


def _segments(program: bytes) -> list[_Segment]:
    start, count = _header_table(program)
    return [_Segment(*_HEADER.unpack_from(program, start + index * _HEADER.size)) for index in range(count)]


def _only(segments: list[_Segment], kind: int) -> _Segment:
    found = [segment for segment in segments if segment.kind == kind]
    if len(found) != 1:
        raise ValueError("not a dynamic executable")
    return found[0]


def _entries(table: bytes) -> list[tuple[int, int]]:
    entries = [(tag, value) for tag, value in _DYNAMIC_ENTRY.iter_unpack(table)]
    return entries[: [tag for tag, _ in entries].index(_DT_NULL)]


def _file_offset(segments: list[_Segment], address: int) -> int:
    for segment in segments:
        if segment.kind == _LOAD and segment.address <= address < segment.address + segment.file_bytes:
            return address - segment.address + segment.offset
    raise ValueError(f"address {address:#x} is in no segment")


def _moved(segment: _Segment, target: _Segment, by: int, size: int) -> _Segment:
    address = target.address + by
    return replace(
        segment,
        offset=target.offset + by,
        address=address,
        physical=address,
        file_bytes=size,
        memory_bytes=size,
    )


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
