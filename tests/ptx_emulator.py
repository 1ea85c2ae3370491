"""Run the code that Triton compiles, its PTX, on a machine without a GPU: a small and slow emulator on numpy.

Triton's interpreter runs a kernel's Python. What the compiler makes of it, how a tile is spread over threads, what goes
through shared memory and where a barrier stands, only the compiled code shows. Here it runs one program (a block of
threads) after another, and all threads of a program in lockstep: every instruction is carried out by all of them
before the next one begins. A register is an array with a number per thread, so that most instructions are one numpy
function (``FUNCTIONS``); a thread whose guard is false (``@%p1 st...``) keeps what it had.

Lockstep is one of the orders in which a GPU may run the threads. What another order could change is looked for:

- a *race*: two warps access the same byte, at least one writes it, and no barrier of the program lies between. Equal
  values may be written twice, and atomic additions do not race among themselves. So are two threads that store
  different values to one place in one instruction.
- an access *outside* the tensors that the kernel was called with, or outside its shared memory. Tensors lie 4 GiB
  apart, so that no index that is a little wrong lands in the next one.
- a *misaligned* access, which on a GPU ends the kernel.

Registers and shared memory hold garbage before they are written.

Not seen: what programs of one launch do to each other at the same time, and the lanes of one warp likewise; what ptxas
makes of PTX, where a multiplication and an addition may become one rounding. Branches that only some threads take,
tensor cores, asynchronous copies and all other instructions that are not in the tables are errors that name them.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution. Shapes: N = threads of a program, B = bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray

_LANES = 32
_MOST_STEPS = 3_000_000
_APART = 32  # bits of an address that are a place in a tensor; those above are the tensor's number

# --- Types and functions -----------------------------------------------------------------------------------

_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}
_BITS32 = np.dtype("u4")


def type_of(suffix: str) -> np.dtype:
    """What the end of an instruction says: ``s32``, ``f64``, ``b16``, ``pred``."""
    if suffix == "pred":
        return np.dtype(bool)
    return np.dtype(f"{_KINDS[suffix[0]]}{int(suffix[1:]) // 8}")


def bits_of(dtype: np.dtype) -> np.dtype:
    """The type as a register holds it."""
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


def wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


def multiply_high(a: Array, b: Array) -> Array:
    return ((a.astype(object) * b.astype(object)) >> (8 * a.itemsize)).astype(a.dtype)


def multiply_wide(a: Array, b: Array) -> Array:
    return a.astype(wide(a.dtype)) * b.astype(wide(b.dtype))


def shift_left(a: Array, by: Array) -> Array:
    """PTX shifts everything out where C says nothing."""
    bits = 8 * a.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def shift_right(a: Array, by: Array) -> Array:
    bits = 8 * a.itemsize
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, 0).astype(a.dtype)


def extract(a: Array, first: Array, length: Array) -> Array:
    """``bfe``: a field of bits, its sign extended where the type has one. A field must fit."""
    bits = 8 * a.itemsize
    if (first + length > bits).any() or (length == 0).any():
        raise NotImplementedError("bfe of a field that is empty or does not fit")
    # Up to the top, so that the field's first bit is the sign, and down again.
    return shift_right(shift_left(a, bits - first - length), bits - length)


def insert(field: Array, a: Array, first: Array, length: Array) -> Array:
    """``bfi``: ``a`` with a field of bits replaced."""
    mask = shift_left(~shift_left(~np.zeros_like(a), length), first)
    return (a & ~mask) | (shift_left(field, first) & mask)


def permute(a: Array, b: Array, selection: Array) -> Array:
    """``prmt``: each byte of the result is one of the eight of a and b, or eight times its sign."""
    bytes_N8 = np.stack([a, b], axis=1).view(np.uint8)
    wanted_N4 = (selection[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & 15
    chosen_N4 = np.take_along_axis(bytes_N8, (wanted_N4 & 7).astype(np.int64), axis=1)
    sign_N4 = (chosen_N4 >> 7) * np.uint8(255)
    return np.where(wanted_N4 & 8, sign_N4, chosen_N4).astype(np.uint8).view(np.uint32)[:, 0]


def shuffled(source_of: Callable[[Array, Array], Array], whole: int) -> Callable[..., Array]:
    """``shfl``: the value of another lane of the warp; a lane that looks beyond the warp keeps its own."""

    def shuffle(a: Array, by: Array, clamp: Array, members: Array) -> Array:
        _expect_whole_warps(members)
        if (clamp != whole).any():
            raise NotImplementedError("shfl within parts of a warp")
        thread = np.arange(len(a))
        lane = thread % _LANES
        source = source_of(lane, by.astype(np.int64))
        return a[thread - lane + np.where((source >= 0) & (source < _LANES), source, lane)]

    return shuffle


def over_warp(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """``redux``: one number of all lanes, to every lane."""

    def reduced(a: Array, members: Array) -> Array:
        _expect_whole_warps(members)
        return np.repeat(reduce(a.reshape(-1, _LANES)), _LANES)

    return reduced


def ballot(flags: Array, members: Array) -> Array:
    _expect_whole_warps(members)
    return np.repeat(np.packbits(flags, bitorder="little").view(np.uint32), _LANES)


def _expect_whole_warps(members: Array) -> None:
    if (members != 0xFFFFFFFF).any():
        raise NotImplementedError("an exchange between some lanes of a warp")


# What an instruction reads: t its type, w twice as wide, u 32 bits (an amount, a position), p a predicate. Comparisons
# of floats are false where one is NaN; those that end in u are true.
FUNCTIONS: dict[str, tuple[str, Callable[..., Array]]] = {
    "add": ("tt", np.add),
    "sub": ("tt", np.subtract),
    "mul": ("tt", np.multiply),
    "mul.lo": ("tt", np.multiply),
    "mul.hi": ("tt", multiply_high),
    "mul.wide": ("tt", multiply_wide),
    "mad.lo": ("ttt", lambda a, b, c: a * b + c),
    "mad.wide": ("ttw", lambda a, b, c: multiply_wide(a, b) + c),
    "div": ("tt", lambda a, b: (a - np.fmod(a, b)) // b),  # of integers, towards zero
    "div.rn": ("tt", np.divide),
    "neg": ("t", np.negative),
    "min": ("tt", np.fmin),
    "max": ("tt", np.fmax),
    "and": ("tt", np.bitwise_and),
    "or": ("tt", np.bitwise_or),
    "xor": ("tt", np.bitwise_xor),
    "not": ("t", np.invert),
    "shl": ("tu", shift_left),
    "shr": ("tu", shift_right),
    "bfe": ("tuu", extract),
    "bfi": ("ttuu", insert),
    "popc": ("t", lambda a: np.bitwise_count(a).astype(np.uint32)),
    "prmt": ("ttt", permute),
    "selp": ("ttp", lambda a, b, flag: np.where(flag, a, b)),
    "setp.eq": ("tt", np.equal),
    "setp.ne": ("tt", lambda a, b: (a < b) | (a > b)),
    "setp.lt": ("tt", np.less),
    "setp.le": ("tt", np.less_equal),
    "setp.gt": ("tt", np.greater),
    "setp.ge": ("tt", np.greater_equal),
    "setp.neu": ("tt", np.not_equal),
    "setp.ltu": ("tt", lambda a, b: ~(a >= b)),
    "setp.leu": ("tt", lambda a, b: ~(a > b)),
    "setp.num": ("tt", lambda a, b: (a == a) & (b == b)),
    "shfl.sync.bfly": ("tuuu", shuffled(lambda lane, by: lane ^ by, 31)),
    "shfl.sync.up": ("tuuu", shuffled(lambda lane, by: lane - by, 0)),
    "shfl.sync.idx": ("tuuu", shuffled(lambda lane, by: by & 31, 31)),
    "redux.sync.add": ("tu", over_warp(lambda a: a.sum(1, dtype=a.dtype))),
    "redux.sync.min": ("tu", over_warp(lambda a: a.min(1))),
    "redux.sync.max": ("tu", over_warp(lambda a: a.max(1))),
    "vote.sync.ballot": ("pu", ballot),
}
# These are of all lanes; they have no guard.
_TOGETHER = ("bar.", "shfl.", "redux.", "vote.", "ldmatrix.", "stmatrix.")
_CONVERSION = re.compile(r"cvt(?:\.rn)?\.(\w+)\.(\w+)$")
_TRANSFER = re.compile(r"(ld|st)\.(shared|global|param)(?:\.v[24])?\.(\w+)$")
_ATOMIC = re.compile(r"(atom)\.(shared|global)(?:\.gpu\.(?:relaxed|acq_rel))?\.add\.(\w+)$")
_MATRIX = re.compile(r"(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x[124]\.(shared)\.(b16)$")

# --- Reading PTX -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One instruction, its operands registers by name, numbers (an array [N]), or vectors of them (a list)."""

    text: str
    kind: str  # the method of a program that carries it out
    operands: list[Any]
    types: Sequence[np.dtype] = ()  # of what it reads; of a transfer, of what it moves
    function: Callable[..., Array] | None = None
    space: str = ""
    offset: int = 0  # added to an address
    guard: str = ""
    is_negated: bool = False


class Code:
    """A kernel's instructions and where its labels point."""

    def __init__(self, ptx: str) -> None:
        self.num_threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        body = re.sub(r"//.*", "", re.search(r"\n\{\n(.*?)\n\}", ptx, re.DOTALL)[1])
        body = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", body, flags=re.MULTILINE)
        self.registers = {
            name: bits_of(type_of(kind)) for kind, name in re.findall(r"\.reg \.(\w+)\s+%(\w+)<\d+>;", body)
        }
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        for statement in body.split(";"):
            text = " ".join(statement.split())
            while label := re.match(r"(\$?\w+): ?", text):
                self.labels[label[1]] = len(self.instructions)
                text = text[label.end() :]
            if text and not text.startswith((".reg", ".local")):
                self.instructions.append(self._instruction(text))

    def register_type(self, name: str) -> np.dtype:
        of = self.registers.get(name.strip("%0123456789"))
        if of is None:
            raise NotImplementedError(f"a register that tests/ptx_emulator.py does not know: {name}")
        return of

    def _instruction(self, text: str) -> Instruction:
        guard, opcode, rest = re.fullmatch(r"(?:@(!?%\w+) )?(\S+) ?(.*)", text).groups()
        guarded = {"guard": (guard or "").lstrip("!"), "is_negated": (guard or "").startswith("!")}
        names = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest)

        name, _, suffix = opcode.rpartition(".")
        unknown = NotImplementedError(f"an instruction that tests/ptx_emulator.py does not know: {text}")
        if guard and opcode.startswith(_TOGETHER):
            raise unknown
        if opcode in ("bra", "bra.uni", "ret"):
            return Instruction(text, opcode.removesuffix(".uni"), names, **guarded)
        if text in ("bar.sync 0", "bar.warp.sync -1"):
            return Instruction(text, opcode.replace(".", "_"), [], **guarded)
        if match := (_TRANSFER.match(opcode) or _ATOMIC.match(opcode) or _MATRIX.match(opcode)):
            kind, space, suffix = match.groups()
            moved = type_of("b32" if kind in ("ldmatrix", "stmatrix") else suffix)
            # The address comes first where something is stored, else second.
            moves, address, *more = names[::-1] if kind.startswith("st") else names
            base, offset = re.fullmatch(r"\[ ?(.+?) ?(?:\+ ?(-?\d+) ?)?\]", address).groups()
            operands = [self._vector(moves, moved), base if space == "param" else self._operand(base, _BITS32)]
            operands += [self._operand(one, moved) for one in more]
            return Instruction(text, kind, operands, [moved], None, space, int(offset or 0), **guarded)
        if name == "mov":
            types = [_part(type_of(suffix), one.count(",") + 1) for one in names]
            operands = [self._vector(*one) for one in zip(names, types, strict=True)]
            return Instruction(text, "mov", operands, types, **guarded)
        reads, function = FUNCTIONS.get(name, ("", None))
        types = [_read_type(letter, type_of(suffix)) for letter in reads]
        if match := _CONVERSION.match(opcode):
            to, source = (type_of(one) for one in match.groups())
            types, function = [source], lambda a: a.astype(to)
            # How floats become integers, and wide floats narrow ones, has rules that nothing here knows.
            if source.kind == "f" and (to.kind != "f" or to.itemsize < source.itemsize):
                raise unknown
        if function is None or len(names) != 1 + len(types) or (name == "div" and suffix[0] == "f"):
            raise unknown
        sources = [self._operand(*one) for one in zip(names[1:], types, strict=True)]
        return Instruction(text, "compute", [names[0], *sources], types, function, **guarded)

    def _vector(self, text: str, dtype: np.dtype) -> list[str | Array]:
        return [self._operand(part.strip(), dtype) for part in text.strip("{}").split(",")]

    def _operand(self, text: str, dtype: np.dtype) -> str | Array:
        if text.startswith("%") or text == "_":
            return text
        return np.full(self.num_threads, number_of(text, dtype))


def _part(dtype: np.dtype, num_parts: int) -> np.dtype:
    return dtype if num_parts == 1 else np.dtype(f"u{dtype.itemsize // num_parts}")


def _read_type(letter: str, dtype: np.dtype) -> np.dtype:
    return {"t": dtype, "u": _BITS32, "p": np.dtype(bool)}[letter] if letter != "w" else wide(dtype)


def number_of(text: str, dtype: np.dtype) -> Any:
    if text == "global_smem":  # shared memory begins at 0
        return dtype.type(0)
    if match := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
        return np.array(int(match[1], 16), bits_of(dtype)).view(dtype)
    value = int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return bool(value)
    return np.array(value & (2 ** (8 * dtype.itemsize) - 1), bits_of(dtype)).view(dtype)


# --- Memory ------------------------------------------------------------------------------------------------


def address_of(piece: int, first: int) -> int:
    return (piece << _APART) + first


class Memory:
    """Pieces of memory, far apart, and which warps accessed their bytes since the last barrier (a bit for each)."""

    def __init__(self, name: str, pieces: Sequence[Array], found: Counter[str]) -> None:
        self.found, self._name = found, name
        self._sizes = np.array([len(piece) for piece in pieces], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        # A byte more, which is outside: there may be none.
        self._bytes = np.concatenate([*pieces, np.zeros(1, np.uint8)])
        self._is_inside = np.zeros(len(self._bytes), bool)
        self._read, self._written, self._added = np.zeros([3, len(self._bytes)], np.uint32)
        self._touched: list[Array] = []

    def allow(self, piece: int, first: int, num_bytes: int) -> None:
        """These bytes of a piece are what a program may access."""
        start = self._starts[piece] + first
        self._is_inside[start : start + num_bytes] = True

    def piece(self, number: int) -> Array:
        return self._bytes[self._starts[number] : self._starts[number] + self._sizes[number]]

    def barrier(self) -> None:
        for at in self._touched:
            self._read[at] = self._written[at] = self._added[at] = 0
        self._touched.clear()

    def load(self, address_N: Array, thread_N: Array, num_bytes: int, text: str) -> Array:
        """The bytes [N, num_bytes] at these addresses; garbage where there are none."""
        at_NB, is_inside_N = self._locate(address_N, num_bytes, text)
        own = self._warps(thread_N)
        written, added = self._written[at_NB], self._added[at_NB]
        # What a warp wrote itself is there, whoever else wrote it too.
        self._expect(((written & own == 0) & (written != 0) | (added & ~own != 0))[is_inside_N], text)
        self._note(self._read, at_NB, own, is_inside_N)
        return np.where(is_inside_N[:, None], self._bytes[at_NB], np.uint8(0xA5))

    def store(self, address_N: Array, thread_N: Array, values_NB: Array, text: str) -> None:
        at_NB, is_inside_N = self._locate(address_N, values_NB.shape[1], text)
        at_NB, values_NB, thread_N = at_NB[is_inside_N], values_NB[is_inside_N], thread_N[is_inside_N]
        own = self._warps(thread_N)
        others = self._read[at_NB] | self._added[at_NB]
        others |= np.where(self._bytes[at_NB] != values_NB, self._written[at_NB], 0).astype(np.uint32)
        self._bytes[at_NB] = values_NB
        self._expect((others & ~own != 0) | (self._bytes[at_NB] != values_NB), text)
        self._note(self._written, at_NB, own)

    def add(self, address_N: Array, thread_N: Array, value_N: Array, text: str) -> Array:
        """Atomically; what was there before."""
        at_NB, is_inside_N = self._locate(address_N, value_N.itemsize, text)
        own = self._warps(thread_N)
        self._expect((((self._read | self._written)[at_NB] & ~own) != 0)[is_inside_N], text)
        self._note(self._added, at_NB, own, is_inside_N)
        before_N = np.zeros_like(value_N)
        for thread in np.flatnonzero(is_inside_N):
            before_N[thread : thread + 1] = self._bytes[at_NB[thread]].view(value_N.dtype)
            self._bytes[at_NB[thread]] = (before_N + value_N)[thread : thread + 1].view(np.uint8)
        return before_N

    def _locate(self, address_N: Array, num_bytes: int, text: str) -> tuple[Array, Array]:
        """Places in ``bytes``, [N, num_bytes], and whether they are all inside; if not, place 0 stands for them."""
        piece_N, first_N = address_N >> _APART, address_N & (2**_APART - 1)
        is_inside_N = (piece_N >= 0) & (piece_N < len(self._sizes))
        piece_N = np.where(is_inside_N, piece_N, 0)
        is_inside_N &= first_N + num_bytes <= self._sizes[piece_N]
        first_N = np.where(is_inside_N, self._starts[piece_N] + first_N, 0)
        at_NB = first_N[:, None] + np.arange(num_bytes)
        at_NB[~is_inside_N] = 0
        is_inside_N &= self._is_inside[at_NB].all(axis=1)
        if not is_inside_N.all():
            self.found[f"outside of {self._name} memory: {text}"] += 1
        if (address_N % num_bytes).any():
            self.found[f"misaligned in {self._name} memory: {text}"] += 1
        return at_NB, is_inside_N

    def _warps(self, thread_N: Array) -> Array:
        return (np.uint32(1) << (thread_N // _LANES).astype(np.uint32))[:, None]

    def _note(self, accessed: Array, at_NB: Array, own: Array, is_inside_N: Array | slice = slice(None)) -> None:
        at_NB, own = at_NB[is_inside_N], own[is_inside_N]
        np.bitwise_or.at(accessed, at_NB.ravel(), np.broadcast_to(own, at_NB.shape).ravel())
        self._touched.append(at_NB.ravel())

    def _expect(self, races: Array, text: str) -> None:
        if races.any():
            self.found[f"race in {self._name} memory: {text}"] += 1


# --- Running -----------------------------------------------------------------------------------------------


class Program:
    """One program of a launch: its registers, where it stands, and a method for each kind of instruction."""

    def __init__(
        self, code: Code, arguments: list[int], number: int, num_programs: int, memory: dict[str, Memory]
    ) -> None:
        self._code, self._arguments, self._memory = code, arguments, memory
        self._threads = np.arange(code.num_threads)
        self._everyone = np.ones(code.num_threads, bool)
        self._registers: dict[str, Array] = {
            "%tid.x": self._threads.astype(np.uint32),
            "%ctaid.x": np.full(code.num_threads, number, np.uint32),
            "%nctaid.x": np.full(code.num_threads, num_programs, np.uint32),
        }
        self.num_steps = 0

    def run(self) -> None:
        at: int | None = 0
        with np.errstate(all="ignore"):
            while at is not None:
                self.num_steps += 1
                if self.num_steps > _MOST_STEPS:
                    raise RuntimeError(f"a program that does not end after {_MOST_STEPS:,} instructions")
                at = self._step(at)

    def _step(self, at: int) -> int | None:
        """Carry out one instruction; where the next one is, None at the end."""
        one = self._code.instructions[at]
        active = self._everyone
        if one.guard:
            active = self._read(one.guard, np.dtype(bool)) ^ one.is_negated
        if one.kind in ("bra", "ret"):
            if active.any() != active.all():
                raise NotImplementedError(f"a branch that only some threads take: {one.text}")
            if not active.any():
                return at + 1
            return self._code.labels[one.operands[0]] if one.kind == "bra" else None
        if active.any():
            getattr(self, f"_{one.kind}")(one, active)
        return at + 1

    def _read(self, operand: Any, dtype: np.dtype) -> Array:
        """A register's lower bits as the type; what was never written is garbage."""
        if not isinstance(operand, str):
            return operand
        value = self._registers.get(operand)
        if value is None:
            of = self._code.register_type(operand)
            value = np.full(self._code.num_threads, of.type(0x5A5A5A5A5A5A5A5A >> (64 - 8 * of.itemsize)))
        if value.itemsize > dtype.itemsize:
            value = value.astype(bits_of(dtype))
        return value.view(dtype)

    def _write(self, name: str, value: Array, active: Array) -> None:
        """A narrower value is extended by its own sign."""
        if name == "_":
            return
        to = self._code.register_type(name)
        if value.itemsize < to.itemsize and value.dtype.kind in "iu":
            value = value.astype(f"{value.dtype.kind}{to.itemsize}")
        value = value.view(to)
        if active is not self._everyone:
            value = np.where(active, value, self._read(name, to))
        self._registers[name] = value

    def _compute(self, one: Instruction, active: Array) -> None:
        sources = map(self._read, one.operands[1:], one.types)
        self._write(one.operands[0], one.function(*sources), active)

    def _mov(self, one: Instruction, active: Array) -> None:
        """Register to register, or between a wide one and its parts, the lowest first."""
        (targets, sources), (target_type, source_type) = one.operands, one.types
        parts = np.stack([self._read(source, source_type) for source in sources], axis=1)
        for target, value in zip(targets, parts.view(target_type).T, strict=True):
            self._write(target, np.ascontiguousarray(value), active)

    def _bar_sync(self, one: Instruction, active: Array) -> None:
        for memory in self._memory.values():
            memory.barrier()

    def _bar_warp_sync(self, one: Instruction, active: Array) -> None:
        """In lockstep, nothing."""

    def _addresses(self, one: Instruction) -> Array:
        dtype = np.dtype("u4") if one.space == "shared" else np.dtype("u8")
        return self._read(one.operands[1], dtype).astype(np.int64) + one.offset

    def _ld(self, one: Instruction, active: Array) -> None:
        [dtype] = one.types
        names = one.operands[0]
        if one.space == "param":
            argument = self._arguments[int(one.operands[1].rpartition("_")[2])]
            self._write(names[0], np.full(len(active), number_of(str(argument), dtype)), active)
            return
        loaded = np.zeros([len(active), len(names) * dtype.itemsize], np.uint8)
        where = self._addresses(one)[active], self._threads[active]
        loaded[active] = self._memory[one.space].load(*where, loaded.shape[1], one.text)
        for name, value in zip(names, loaded.view(dtype).T, strict=True):
            self._write(name, np.ascontiguousarray(value), active)

    def _st(self, one: Instruction, active: Array) -> None:
        values = np.stack([self._read(name, one.types[0]) for name in one.operands[0]], axis=1)[active]
        where = self._addresses(one)[active], self._threads[active]
        self._memory[one.space].store(*where, values.view(np.uint8), one.text)

    def _atom(self, one: Instruction, active: Array) -> None:
        [name], _, added = one.operands
        value = self._read(added, one.types[0])
        before = np.zeros_like(value)
        where = self._addresses(one)[active], self._threads[active]
        before[active] = self._memory[one.space].add(*where, value[active], one.text)
        self._write(name, before, active)

    def _row_addresses(self, one: Instruction, matrix: int) -> Array:
        """Of matrices 8 by 8 of 16 bits: lanes 8m to 8m + 7 hold where the rows of matrix m are, and each lane takes
        two neighbours of row lane / 4."""
        lane = self._threads % _LANES
        rows = self._addresses(one)[self._threads - lane + 8 * matrix + lane // 4]
        return rows + 4 * (lane % 4)

    def _ldmatrix(self, one: Instruction, active: Array) -> None:
        for matrix, name in enumerate(one.operands[0]):
            loaded = self._memory["shared"].load(self._row_addresses(one, matrix), self._threads, 4, one.text)
            self._write(name, loaded.view(np.uint32)[:, 0], active)

    def _stmatrix(self, one: Instruction, active: Array) -> None:
        for matrix, name in enumerate(one.operands[0]):
            values = self._read(name, np.dtype("u4"))[:, None].view(np.uint8)
            self._memory["shared"].store(self._row_addresses(one, matrix), self._threads, values, one.text)


def run_programs(code: Code, num_programs: int, arguments: list[int], memory: Memory, shared_bytes: int) -> int:
    """Run a launch, one program after another, each with shared memory of its own; how many instructions that took."""
    num_steps = 0
    generator = np.random.default_rng(0)
    for number in range(num_programs):
        shared = Memory("shared", [generator.integers(0, 256, shared_bytes, np.uint8)], memory.found)
        shared.allow(0, 0, shared_bytes)
        program = Program(code, arguments, number, num_programs, {"global": memory, "shared": shared})
        program.run()
        memory.barrier()
        num_steps += program.num_steps
    return num_steps
