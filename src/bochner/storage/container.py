"""The file format of models: a safetensors file with JSON in its header, a checksum and, on request, a signature.

The first eight bytes are the length of the header. The header is JSON: type, shape and place of every tensor, and under
``__metadata__`` the model's own JSON, the checksum and the signature. The checksum is the SHA-256 of the whole file with zeros in
its own place. The signature is the HMAC-SHA256 of the whole file with zeros in both places.

The format is that of the safetensors library. It is written here because that library writes the fields of ``__metadata__`` in an
order that changes from run to run, and a model should give the same bytes every time. It is read here so that the sizes in the
header can be judged before any tensor is read; then each tensor is read into its own memory while the digests are computed.
"""

import hashlib
import hmac
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bochner
from bochner.files import write_bytes
from bochner.storage.rules import Entry, WrongValue, require, whole

FORMAT = 8  # version of what files hold; a change of a field, a tensor or the meaning of one raises it
MAX_HEADER_BYTES = 64 * 2**20  # the header of a model with a million categories is smaller
MAX_HEADER_VALUES = 1_000_000  # commas and brackets in the header: bounds the memory of the parsed JSON to about 200 MB
MAX_FILE_BYTES = 2 * 2**30
DIGEST_ZEROS = "0" * 64  # stands for a digest while it is computed
METADATA = "__metadata__"
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Json = dict[str, Any]
Tensors = dict[str, Tensor]


class ModelFileError(ValueError):
    """A file that is not a model, or not one that can be trusted or read."""


def damaged(path: Path, problem: object) -> ModelFileError:
    """The error for a file whose contents are not those of any valid file.

    Only the first sentence of the problem is told: what follows is advice for other causes.
    """
    cause = str(problem).partition(". ")[0].removesuffix(".")
    return ModelFileError(f"{path} is damaged or was edited: {cause}; fetch or save it again.")


def check_key(key: object) -> None:
    """Raises a ValueError unless the key of a signature is None or bytes."""
    if key is not None and not (isinstance(key, bytes) and key):
        raise ValueError(f"The key parameter must be bytes, at least one, got {type(key).__name__} instead.")


# ------------------------------------------------------------------ writing


def versions() -> Json:
    """Versions of the format and of the libraries, for the JSON of a file."""
    return {"format": FORMAT, "bochner": bochner.__version__, "torch": str(torch.__version__)}


def as_json(content: Json) -> Json:
    """Contents as they come back from a file: tuples become lists, and NumPy's numbers plain ones."""
    return json.loads(json.dumps(content, default=lambda value: value.item()))


def on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors as they are written."""
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def declared(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Types and shapes of tensors, as the header of a file declares them."""
    return {name: Entry(value.dtype, tuple(value.shape), value.nbytes) for name, value in tensors.items()}


def write_container(path: Path, content: Json, tensors: Mapping[str, Tensor], key: bytes | None = None) -> Path:
    """Writes JSON and tensors to a file, as a whole or not at all; the same contents give the same bytes.

    Args:
        path: The file.
        content: The JSON, from ``as_json``.
        tensors: The tensors, from ``on_cpu``.
        key: Secret of the signature; None for no signature.
    """
    metadata = {"bochner": json.dumps(content, allow_nan=False), "sha256": DIGEST_ZEROS}
    header: Json = {METADATA: metadata | ({} if key is None else {"signature": DIGEST_ZEROS})}
    end = 0
    # The widest types come first, as in files of the safetensors library, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in names:
        value = tensors[name]
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = b"".join([len(encoded).to_bytes(8, "little"), encoded, *(tensors[name].numpy().tobytes() for name in names)])
    if key is not None:
        data = _filled(data, "signature", hmac.new(key, data, hashlib.sha256).hexdigest())
    write_bytes(path, _filled(data, "sha256", hashlib.sha256(data).hexdigest()))
    return path


def _field(name: str, digest: str) -> bytes:
    return f'"{name}":"{digest}"'.encode()


def _filled(data: bytes, name: str, digest: str) -> bytes:
    """A file with a digest in the place of its zeros."""
    return data.replace(_field(name, DIGEST_ZEROS), _field(name, digest), 1)


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Container:
    """An open model file whose header has been read, and whose tensors have not.

    Attributes:
        path: Its path.
        content: Its JSON.
        entries: Type and shape of every tensor, in the order of the file.
        size: Its length in bytes.
    """

    path: Path
    content: Json
    entries: dict[str, Entry]
    size: int
    _start: bytes
    _digests: dict[str, str]
    _file: BufferedReader

    def read_tensors(self, key: bytes | None) -> Tensors:
        """The tensors, each in its own memory; a ModelFileError where the checksum or the signature is wrong."""
        signature = self._digests.get("signature", DIGEST_ZEROS)
        start = self._start.replace(_field("sha256", self._digests["sha256"]), _field("sha256", DIGEST_ZEROS), 1)
        checksum = hashlib.sha256(start)
        start = start.replace(_field("signature", signature), _field("signature", DIGEST_ZEROS), 1)
        signer = None if key is None else hmac.new(key, start, hashlib.sha256)
        tensors = {}
        for name, entry in self.entries.items():
            buffer = bytearray(entry.length)
            if self._file.readinto(buffer) != entry.length:
                raise damaged(self.path, "it became shorter while it was read")
            checksum.update(buffer)
            if signer is not None:
                signer.update(buffer)
            flat = torch.frombuffer(buffer, dtype=entry.dtype) if buffer else torch.empty(0, dtype=entry.dtype)
            tensors[name] = flat.reshape(entry.shape)
        if not hmac.compare_digest(checksum.hexdigest(), self._digests["sha256"]):
            raise damaged(self.path, "its checksum does not match")
        if signer is not None and not hmac.compare_digest(signer.hexdigest(), signature):
            raise ModelFileError(f"{self.path} was signed with another key, or edited since; ask whoever made it.")
        return tensors


@contextmanager
def open_container(path: Path, key: bytes | None = None) -> Iterator[Container]:
    """Opens a model file and reads its header: first the format version, then the sizes of all tensors.

    Args:
        path: The file.
        key: The key that the file must be signed with; None for a file without a signature.

    Raises:
        ModelFileError: It is no model file, or has another format, or its sizes do not agree.
    """
    check_key(key)
    if not path.is_file():
        kind = "is a folder, not a file" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
        raise ModelFileError(f"{path} {kind}; give the file that 'bochner fit' or bochner.storage.save wrote.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start, header = _read_header(path, file, size)
        content, digests = _read_metadata(path, start, header.pop(METADATA))
        _check_format(path, content)
        if (key is not None) != ("signature" in digests):
            problem = "has no signature; load it without a key" if key is not None else "is signed; give its key"
            raise ModelFileError(f"{path} {problem}, if you trust it: load(path{', key=...' * (key is None)}).")
        try:
            entries = _read_entries(header, size - len(start))
        except WrongValue as error:
            raise damaged(path, error) from error
        yield Container(path, content, entries, size, start, digests, file)


def _read_header(path: Path, file: BufferedReader, size: int) -> tuple[bytes, Json]:
    """The length and the header as bytes, and the header as JSON."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    try:
        require(8 < 8 + length <= size <= MAX_FILE_BYTES and length <= MAX_HEADER_BYTES, "the length of the header")
        start += file.read(length)
        header = _parse_json(start[8:].decode())
        require(isinstance(header, dict) and isinstance(header.get(METADATA), dict), "no metadata")
    except (ValueError, RecursionError) as error:
        raise _no_model(path) from error
    return start, header


def _no_model(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path} is not a model of bochner, or it was cut short; save the model again, or fetch the file again."
    )


def _parse_json(text: str) -> Any:
    """JSON without NaN, without a name that is there twice, and of bounded size."""

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        require(len(dict(pairs)) == len(pairs), "a name is there twice")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise WrongValue(f"{name} is not a number")

    require(sum(map(text.count, ",[{")) <= MAX_HEADER_VALUES, "too many values")
    return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)


def _read_metadata(path: Path, start: bytes, metadata: Json) -> tuple[Json, dict[str, str]]:
    """The model's JSON, and the digests."""
    digests = {name: value for name, value in metadata.items() if name != "bochner"}
    known = set(metadata) in ({"bochner", "sha256"}, {"bochner", "sha256", "signature"})
    if not known or not isinstance(metadata["bochner"], str):
        raise _no_model(path)
    if any(not isinstance(v, str) or len(v) != 64 or start.count(_field(n, v)) != 1 for n, v in digests.items()):
        raise _no_model(path)
    try:
        content = _parse_json(metadata["bochner"])
        require(isinstance(content, dict) and "format" in content, "it has no format")
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    return content, digests


def _check_format(path: Path, content: Json) -> None:
    try:
        whole(0, 10**6)(content["format"], "format")
    except WrongValue as error:
        raise damaged(path, error) from error
    if content["format"] != FORMAT:
        writer = content.get("bochner")
        version = f"; it was written by bochner {writer}: use that version" if isinstance(writer, str) else ""
        raise ModelFileError(
            f"{path} has format {content['format']}, and this bochner ({bochner.__version__}) reads format {FORMAT}"
            f"{version[:100]}."
        )


def _read_entries(header: Json, size: int) -> dict[str, Entry]:
    """The tensors, in the order of the file; their bytes must be all that follows the header."""
    places, entries = {}, {}
    for name, value in header.items():
        require(
            isinstance(value, dict) and set(value) == {"dtype", "shape", "data_offsets"}, f"{name} is not described"
        )
        dtype, shape, place = value["dtype"], value["shape"], value["data_offsets"]
        require(isinstance(dtype, str) and dtype in DTYPES, f"{name} must hold {' or '.join(DTYPES)}")
        for numbers, what in ((shape, "shape"), (place, "place")):
            right = isinstance(numbers, list) and len(numbers) <= 2 and all(type(n) is int and 0 <= n for n in numbers)
            require(right and max(numbers, default=0) <= MAX_FILE_BYTES, f"{name} has no valid {what}")
        require(len(place) == 2, f"{name} has no valid place")
        length = math.prod(shape) * DTYPES[dtype].itemsize
        require(
            place[1] - place[0] == length, f"{name} has {place[1] - place[0]} bytes, and its shape asks for {length}"
        )
        places[name], entries[name] = place, Entry(DTYPES[dtype], tuple(shape), length)
    order = sorted(entries, key=places.__getitem__)
    ends = [0, *(places[name][1] for name in order)]
    require(all(places[name][0] == end for name, end in zip(order, ends, strict=False)), "the tensors are not in a row")
    require(ends[-1] == size, f"the tensors take {ends[-1]} bytes, and the file has {size} for them")
    return {name: entries[name] for name in order}
