"""Every message survives the wire, and nothing else passes it."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest

from lib.contracts.errors import ProtocolError
from lib.contracts.schemas import MEASUREMENTS
from lib.contracts.statuses import Status
from lib.measure import protocol, wire
from lib.measure.protocol import (
    BeginSession,
    Begun,
    Build,
    BuildModel,
    Built,
    Check,
    Checked,
    CheckLibraries,
    Compare,
    Compared,
    Compile,
    Compiled,
    Define,
    DeviceFault,
    Done,
    Drop,
    Failed,
    FileOpened,
    Infer,
    Inferred,
    Measure,
    OpenFile,
    OpenLibrary,
    PackWeights,
    Param,
    Ready,
    Refused,
    Reply,
    Request,
    Time,
    Timed,
    TimeLibrary,
    answer_type,
)

A, B = Path("/scratch/a.so"), Path("/scratch/b.so")
PARAMS = (Param((1, 768), "float32", 0), Param((), "int64", 1000))

ANSWERS = [
    (Define('{"nodes": ["\\n"]}'), Done),
    (Build("candidate", "[[], []]"), Built),
    (Build("candidate", "[[], []]", as_shipped=True), Built),
    (Time("candidate", 3, 0.02), Timed),
    (Time("candidate", 3, 0.02, slow_above_s=2.5e-3, number=7, cold_weights=True), Timed),
    (Drop(), Done),
    (Check("[[], []]"), Checked),
    (Compile("[[], []]", A, pack=True), Compiled),
    (Measure(A, PARAMS, 3, 0.02, None, 10.0), Timed),
    (Compare((A, B), (1, 0, 1), PARAMS, 0.02, 10.0), Compared),
    (CheckLibraries((A, B), PARAMS, 10.0), Checked),
    (BeginSession(7200.0), Done),
    (BuildModel(Path("module.json"), A, Path("traces.json"), Path("packing.json")), Done),
    (BuildModel(Path("module.json"), A, in_plain_loops=True), Done),
    (PackWeights((A, Path("b.json")), (Path("a.npz"), Path("b.npz")), Path("out"), Path("listed.json")), Done),
    (OpenLibrary("tuned", A, Path("p.npz"), Path("i.npz")), Done),
    (OpenFile("onnx", Path("m.onnx"), Path("f.onnx"), Path("i.npz"), 2), FileOpened),
    (Infer("tuned", Path("out.npz")), Inferred),
    (TimeLibrary("tuned", 0.5), Inferred),
]
REPLIES = [
    Ready(), Begun(), Done(), Refused("no request"), Built(0.25), Timed((1e-5, 2e-5), 7, 0.1), Inferred(1e-3),
    FileOpened("ONNX Runtime 1.31.1", True),
    Timed((1e-5,), 1, 0.1, "zen5 at 10.0.0.1:9100"), Checked(1e-7), Checked(math.inf), Compiled(0.25, PARAMS),
    Compared(((1e-5, 2e-5), ())), Failed(Status.CRASH, "SIGSEGV"), Failed(DeviceFault.LOST, "the connection broke"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "answer"), ANSWERS)
def test_a_request_survives_the_wire_and_names_its_answer(request_, answer):
    line = wire.encode(request_)

    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert wire.decode_request(line) == request_
    assert answer_type(request_) is answer


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_survives_the_wire(reply):
    found = wire.decode_reply(wire.encode(reply))

    assert found == reply
    assert {type(getattr(found, field.name)) for field in fields(found)} == {
        type(getattr(reply, field.name)) for field in fields(reply)
    }


def declared(base):
    found = (each for each in vars(protocol).values() if isinstance(each, type) and issubclass(each, base))
    return {each for each in found if each is not base}


def test_every_message_is_among_those_that_were_tried():
    assert {type(request) for request, _ in ANSWERS} == set(protocol.REQUESTS) == declared(Request)
    assert {type(reply) for reply in REPLIES} == set(protocol.REPLIES) == declared(Reply)


def test_what_is_no_number_survives_in_plain_json():
    line = wire.encode(Checked(math.nan))

    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(wire.decode_reply(line).max_error)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "not a message"),
        ("{", "not a message"),
        ("[]", "not one of Define, "),
        ("{}", "not one of Define, "),
        ('{"message": "Exec", "code": "1"}', "not one of Define, .*Exec"),
        ('{"message": "Ready"}', "not one of Define, "),
        ('{"message": ["Drop"]}', "not one of Define, "),
        (
            '{"message": "Build", "candidate_id": "a"}',
            "Build has the fields candidate_id, trace, as_shipped, but got candidate_id",
        ),
        ('{"message": "Drop", "all": true}', "Drop has the fields"),
        ('{"message": "Define", "workload": null}', "Define: None is no str"),
        ('{"message": "TimeLibrary", "name": "a", "seconds": true}', "True is no float"),
        ('{"message": "TimeLibrary", "name": "a", "seconds": "soon"}', "'soon' is no float"),
        ('{"message": "Infer", "name": "a", "out": 1}', "1 is no Path"),
        ('{"message": "CheckLibraries", "libraries": ["a"], "params": [], "limit_s": 1}', r"\['a'\] is no tuple"),
        (
            '{"message": "CheckLibraries", "libraries": ["a", "b"], "params": [{}], "limit_s": 1}',
            "Param has the fields",
        ),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(line, says):
    with pytest.raises(ProtocolError, match=says):
        wire.decode_request(line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"message": "Drop"}', "not one of Ready, "),
        ('{"message": "Failed", "status": "broken", "error": ""}', "'broken' is none of Status, DeviceFault"),
        ('{"message": "Timed", "latencies": 1, "number": 1, "run_s": 1, "device": "", "waited_s": 0}', "1 is no tuple"),
    ],
)
def test_what_is_no_reply_is_refused_with_the_reason(line, says):
    with pytest.raises(ProtocolError, match=says):
        wire.decode_reply(line)


def test_what_is_said_of_a_device_is_no_status_of_a_table():
    assert not {fault.value for fault in DeviceFault} & {status.value for status in Status}


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_a_plain_string_in_tables_in_json_and_in_messages(status):
    table = pa.Table.from_pylist([{"status": status}], schema=pa.schema([MEASUREMENTS.field("status")]))

    [found] = table["status"].to_pylist()
    assert type(found) is str
    assert found == status == str(status) == f"{status}" == json.loads(json.dumps(status))
    assert {status: 1}[found] == 1
