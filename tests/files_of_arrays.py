"""Writers and readers of files of arrays that share no code with the clients, and files that the
clients must refuse."""

import io
import json
import struct
import zipfile

import numpy as np

WORDS = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16",
         "|i1": "I8", "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL",
         "|V2": "BF16"}
RAW = np.random.default_rng(0).integers(0, 2, 48, dtype=np.uint8)
TYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "|i1", "|u1", "|b1", "|V2")


def safetensors(header, data, size=None):
    """Returns the bytes of a file with this header: bytes, or a value that is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensors(arrays):
    header, data = {"__metadata__": {"format": "np"}}, b""
    for key, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[key] = {"dtype": WORDS[array.dtype.str], "shape": array.shape,
                       "data_offsets": offsets}
        data += array.tobytes()
    return safetensors(header, data)


def read_safetensors(path):
    data = path.read_bytes()
    size, = struct.unpack_from("<Q", data)
    kinds = {word: dtype for dtype, word in WORDS.items()}
    found = {}
    for key, one in json.loads(data[8 : 8 + size]).items():
        begin, end = one["data_offsets"]
        elements = np.frombuffer(data[8 + size + begin : 8 + size + end], kinds[one["dtype"]])
        found[key] = elements.reshape(one["shape"])
    return found


def npy(array, **how):
    out = io.BytesIO()
    np.save(out, array, **how)
    return out.getvalue()


def archive(members, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in members:
            made.writestr(name, data)
    return out.getvalue()


def hostile():
    """Returns the contents of files that are not valid files of arrays, in a list for each
    format."""

    def one(**changes):
        header = {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}
        return safetensors(header, b"abcd")

    def two(*offsets, data=b"abcd"):
        return safetensors({str(i): {"dtype": "U8", "shape": [at[1] - at[0]],
                                     "data_offsets": at} for i, at in enumerate(offsets)}, data)

    good = one()
    twice = b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], "shape": [4]}}'
    bad = {
        ".safetensors": [
            b"", good[:7], good[:20], good[:-1], good + b"e",
            safetensors({}, b"", 1 << 40), safetensors({}, b"", (1 << 64) - 1),
            safetensors(b"[" * 100_000, b""), safetensors(b"[]", b""),
            safetensors(b"\xff{}", b""), safetensors(b'{"x": 1}', b""), safetensors(b"{", b""),
            safetensors(b'{"x": []}', b""), safetensors(b"1", b""), safetensors(b"null", b""),
            safetensors(twice, b"abcd"), safetensors({"x": {"dtype": "U8"}}, b""),
            one(shape=[5]), one(shape=[3]), one(shape=[-4]), one(shape=[4.0]), one(shape=4),
            one(data_offsets=4), one(shape=None), one(shape={"4": 4}), one(shape="4"),
            one(shape=[True, 4]), one(shape=[1 << 32, 1 << 32, 0, 4]), one(dtype=8),
            one(dtype="F32"),
            one(data_offsets=[0, 5]), one(data_offsets=[4, 0]), one(data_offsets=[-4, 0]),
            one(data_offsets=[1, 4], shape=[3]), one(data_offsets=[0]), one(shape=[10**30]),
            safetensors({"": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, b""),
            two([0, 3], [2, 4]), two([0, 4], [0, 4]), two([0, 1], [2, 4]), two([0, 3]),
        ],
        ".npy": [
            b"", b"hello", npy(RAW)[:-1], npy(RAW)[:30], npy(RAW)[:10],
            npy(np.array([{}], object)), npy(RAW).replace(b"(48,)", b"(-1,)"),
            b"\x93NUMPY\2\0\xff\xff\xff\xff" + b" " * 100, npy(RAW).replace(b"|u1", b"|zz"),
            b"\x93NUMPY\1\0\xff\xff" + b"(" * 65535,
            b"\x93NUMPY\x09\0" + struct.pack("<I", 118) + npy(RAW)[10:],
            npy(RAW).replace(b"(48,), ", b"(9**9,)"),
        ],
        ".npz": [
            b"", archive([("a.npy", npy(RAW))])[:-30], archive([("a.txt", b"hello")]),
            archive([("a.npy", b"hello")]), archive([("a.npy", npy(RAW)[:-1])]),
            archive([("a.npy", npy(np.array([{}], object)))]),
            archive([("a.npy", npy(RAW)[:-1])], zipfile.ZIP_DEFLATED),
            archive([("a.npy", npy(RAW))]).replace(b"PK\3\4", b"PK\3\5"),
            archive([("a.npy", npy(RAW))]).replace(b"PK\1\2\x14\3\x14\0\0",
                                                   b"PK\1\2\x14\3\x14\0\1"),  # Encrypted.
            archive([("a.npy", npy(RAW))]).replace(b"(48,), ", b"(9**9,)"),
        ],
    }
    both = bytearray(archive([("a.npy", npy(RAW)), ("b.npy", npy(RAW))]))
    struct.pack_into("<I", both, both.rindex(b"PK\1\2") + 42, 0)  # The second file's offset.
    bad[".npz"].append(bytes(both))
    packed = bytearray(archive([("a.npy", npy(np.zeros(10_000)))], zipfile.ZIP_DEFLATED))
    packed[60] ^= 1
    bad[".npz"].append(bytes(packed))
    # A deflated member whose size and shape claim more than its bytes can stand for.
    head = npy(np.zeros(0)).replace(b"(0,), }       ", b"(99999999,), }")
    claim = bytearray(archive([("a.npy", head)], zipfile.ZIP_DEFLATED))
    struct.pack_into("<I", claim, claim.index(b"PK\1\2") + 24, 10**9)
    bad[".npz"].append(bytes(claim))
    return bad
