"""Predictions as a service: the numbers of ``bochner predict``, bad rows by name, and a server that no request can stop."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from starlette.requests import Request
from typer.testing import CliRunner

from bochner.cli import app as commands
from bochner.estimators import StationaryRegressor
from bochner.estimators.evaluation import forecast
from bochner.members.compact import CompactHead
from bochner.serving import app as serving
from bochner.serving import server
from bochner.serving.quick import quick
from bochner.serving.rows import RequestError, _as_cells
from bochner.storage import load, save
from bochner.tables.columns import Column, read_column
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.training.threads import one_thread

JSON = {"content-type": "application/json"}
OPTIONS = {"kernel": "rbf", "hidden_layer_sizes": (), "random_state": 0}


def flats(num=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "area": rng.uniform(30, 200, num).round(2),
            "price": [f"${value:,.0f}" for value in rng.uniform(1e3, 1e5, num)],
            "kind": rng.choice(["flat", "house", "loft"], num),
            "garden": rng.choice(["yes", "no"], num),
            "sold": (pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, num), unit="D")).strftime(
                "%d.%m.%Y"
            ),
            "age": np.where(rng.random(num) < 0.2, np.nan, rng.uniform(0, 100, num).round(1)),
        }
    )
    rent = 10 * frame["area"] + 300 * (frame["kind"] == "house") + rng.normal(0, 20, num)
    return frame, rent.rename("rent")


class Client:
    """Asks an application within this process, without a socket."""

    def __init__(self, app):
        self.transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def request(self, method, path, **options):
        async def ask():
            async with httpx.AsyncClient(transport=self.transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, **options):
        return self.request("POST", path, **options)


class Model:
    """A fitted model, its file, and a client of its service."""

    def __init__(self, estimator, folder):
        self.path = save(folder / "m.bochner", estimator)
        self.estimator = load(self.path, device="cpu").estimator
        self.client = Client(serving.make_app(self.estimator, name="m.bochner"))
        self.row = self.client.get("/model").json()["columns"]
        self.row = {column["name"]: column["example"] for column in self.row}

    def post(self, content, query="", headers=JSON):
        body = content if isinstance(content, bytes | str) else json.dumps(content)
        return self.client.post(f"/predict{query}", content=body, headers=headers)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    frame, rent = flats()
    dear = pd.Series(np.where(rent > 1200, "dear", "cheap"), name="class")
    return {
        "regression": Model(TableRegressor(**OPTIONS).fit(frame, rent), tmp_path_factory.mktemp("number")),
        "classes": Model(TableClassifier(**OPTIONS).fit(frame, dear), tmp_path_factory.mktemp("class")),
    }


@pytest.fixture
def model(models):
    return models["regression"]


# ------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("kind", ["regression", "classes"])
@pytest.mark.parametrize("rows", [1, 25])
def test_the_answers_are_those_of_predict_on_the_same_rows(kind, rows, models, tmp_path):
    """To 1e-4 of a standard deviation, whether numbers come as texts, as in a file, or as numbers."""
    model = models[kind]
    flats(rows, seed=1)[0].to_csv(tmp_path / "new.csv", index=False)
    command = ["predict", model.path, tmp_path / "new.csv", "--out", tmp_path / "out.csv", "--coverage", "0.8"]
    with one_thread():
        result = CliRunner().invoke(commands, list(map(str, command)))
    assert result.exit_code == 0, result.stderr
    written = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    texts = pd.read_csv(tmp_path / "new.csv", dtype=str, keep_default_na=False).to_dict("records")
    numbers = [{**row, "area": float(row["area"]), "age": float(row["age"]) if row["age"] else None} for row in texts]
    for sent in (texts, numbers):
        answer = model.post(sent, "?coverage=0.8").json()
        assert answer["errors"] == []
        got = pd.DataFrame(answer["predictions"])
        if kind == "classes":
            got = got.join(pd.DataFrame(got.pop("probabilities").tolist()).add_prefix("p_"))
        names = {f"{model.estimator.target_.name}_{name}": name for name in got}
        expected = written.rename(columns=names)[list(got)]
        for name, values in got.items():
            if values.dtype == float:
                unit = 1.0 if kind == "classes" or name == "ood_score" else expected["std"].astype(float)
                assert (abs(values - expected[name].astype(float)) <= 1e-4 * unit).all(), name
            else:
                assert list(values.astype(str)) == list(expected[name])


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_one_pass_says_what_the_single_calls_say(kind, models):
    table = models[kind].estimator
    clean, model = table.clean(flats(30, seed=2)[0]), table.estimator_
    with one_thread():
        said = forecast(model, clean, coverage=0.7)
        np.testing.assert_array_equal(said.scores, model.ood_score(clean))
        if kind == "classes":
            np.testing.assert_array_equal(said.values, model.predict_proba(clean))
        else:
            expected = np.column_stack([*model.predict(clean, return_std=True), model.predict_interval(clean, 0.7)])
            np.testing.assert_array_equal(said.values, expected)


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_a_service_predicts_by_products_where_they_say_the_same(kind, models, monkeypatch):
    """Of float32 first, else of float64, else as the estimator does."""
    estimator, wrong = models[kind].estimator.estimator_, []
    if kind == "regression":  # with noise of half a standard deviation: with next to none float32 has too few digits
        x = np.random.default_rng(0).normal(size=(80, 2))
        noise = np.random.default_rng(1).normal(size=80)
        estimator = StationaryRegressor(**OPTIONS).fit(x, x[:, 0] + 0.5 * noise)
    original = CompactHead.predict

    def noisy(self, x):
        mean, variance = original(self, x)
        return mean, variance * (1.001 if self.dtype in wrong else 1.0)

    monkeypatch.setattr(CompactHead, "predict", noisy)
    used = []
    for wrong[:] in ([], [torch.float32], [torch.float32, torch.float64]):
        heads = [member.head for member in quick(estimator).mixtures_[0].members]
        used.append({getattr(head, "dtype", None) for head in heads})
    assert used == [{torch.float32}, {torch.float64}, {None}]
    assert not any(isinstance(member.head, CompactHead) for member in estimator.mixtures_[0].members)


def test_answers_do_not_depend_on_what_runs_beside(model):
    frames = [flats(rows, seed)[0] for seed, rows in enumerate([1, 3, 20, 1, 7, 2] * 4)]
    bodies = [frame.astype(object).where(frame.notna(), None).to_dict("records") for frame in frames]
    alone = [model.post(body).json() for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: model.post(body).json(), bodies))
    assert together == alone


def test_a_number_is_never_read_with_the_wrong_decimal_sign():
    """Beside texts with a decimal comma a number such as 1.234 could be taken for one with a separator of thousands."""
    column = Column("a", "number", "number", decimal=",")
    values = [1.234, -0.5, 1e-7, 3.0, 12, "2,5", "1.234", None]
    numbers = read_column(column, _as_cells(column, [{"a": value} for value in values])).values["a"]
    np.testing.assert_array_equal(numbers, [1.234, -0.5, 1e-7, 3.0, 12, 2.5, 1234, np.nan])
    numbers = _as_cells(column, [{"a": value} for value in (1.234, 7, None)])
    np.testing.assert_array_equal(numbers, [1.234, 7, np.nan])


# ------------------------------------------------------------------ bad rows and bad requests


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("area", "much", "The column 'area' must hold a number, or null, got the text 'much' instead."),
        ("area", [1], "'area' must hold a number, or null, got an array"),
        ("area", {}, "'area' must hold a number, or null, got an object"),
        ("area", True, "'area' must hold a number, or null, got true"),
        ("area", 10**400, "'area' must hold a number, or null, got the number 1000"),
        ("kind", ["loft"], "'kind' must hold a text or a number, or null, got an array"),
        ("garden", "perhaps", "'garden' must hold yes or no"),
        ("sold", "soon", "'sold' must hold a date written as %d.%m.%Y, or null, got the text 'soon'"),
    ],
)
def test_a_bad_cell_is_named_and_the_other_rows_are_answered(column, value, message, model):
    good = flats(3, seed=3)[0].to_dict("records")
    good = [{**row, "age": 5} for row in good]
    alone = model.post(good).json()["predictions"]
    answer = model.post([good[0], {**good[0], column: value}, *good[1:]])
    assert answer.status_code == 200
    (error,) = answer.json()["errors"]
    assert (error["row"], error["column"]) == (1, column)
    assert message in error["error"]
    one, bad, *rest = answer.json()["predictions"]
    assert bad is None
    assert [one, *rest] == alone
    only = model.post({**good[0], column: value})
    assert only.status_code == 422
    assert message in only.json()["error"]
    assert only.json()["errors"][0]["row"] == 0


def test_a_row_that_lacks_a_column_or_is_no_object_is_named(model):
    row = dict(model.row)
    del row["kind"]
    errors = model.post([row, 5, None, "a\u202eb"]).json()["errors"]
    assert errors[0] == {
        "row": 0,
        "column": "kind",
        "error": "The row lacks the column 'kind'; give a text or a number, or null.",
    }
    assert "must be an object with a value for each column, got the number 5 instead" in errors[1]["error"]
    assert "got null" in errors[2]["error"]
    assert "got the text 'a\\u202eb'" in errors[3]["error"]  # no message can turn the direction of writing


def test_many_categories_that_no_utf8_can_hold_are_answered_and_noted(model):
    name = next(column.name for column in model.estimator.table_.used if column.kind == "category")
    answer = model.post([{**model.row, name: "\ud800"}] * 25)
    assert answer.status_code == 200
    assert any(f"{name}: 25 of 25 cells hold values not seen in training" in note for note in answer.json()["notes"])


def test_keys_that_the_model_does_not_know_are_noted(model):
    row = {**model.row, "colour": "red", "rent": 5}  # the target is known, and not used
    answer = model.post([row, {**row, "age": None}]).json()
    assert answer["notes"] == ["columns that the model does not use: 'colour'"]
    strange = model.post({**model.row, "area": None, "price": "€5"}).json()["notes"]
    assert strange == [
        "area: 1 cells are missing, none was in training; such rows count as strange",
        "price: now in '€', in training in '$'; the numbers are taken as they are",
    ]
    gone = "price: 1 cells without '$', which all had in training; the numbers are taken as they are"
    assert model.post({**model.row, "price": "5000"}).json()["notes"] == [gone]
    assert model.post({**model.row, "price": 5000}).json()["notes"] == []  # in the unit that the documents name


MALFORMED = [
    (b"", 400, "The body is not JSON"),
    (b"[", 400, "The body is not JSON"),
    (b"\xff\xfe[]", 400, "The body is not JSON"),
    (b'[{"a": "\xff"}]', 400, "is not UTF-8"),
    (b"[NaN]", 400, "The body holds NaN, which is not JSON; a missing value is null."),
    (b"[-Infinity]", 400, "The body holds -Infinity"),
    (b"[" * 100_000, 400, "nested too deeply"),
    (b'{"a":' * 100_000, 400, "nested too deeply"),
    (b"[" + b"9" * 5000 + b"]", 400, "The body is not JSON"),
    (b'[{"a": 1, "a": 2}]', 400, "has the key 'a' more than once"),
    (b"[]", 422, "at least one row, got an empty array"),
    (b"5", 422, "must be a row or an array of rows, got the number 5 instead"),
    (b'"area=5"', 422, "got the text 'area=5' instead"),
    (b"null", 422, "got null instead"),
    (b"[1e999]", 422, "got the number inf instead"),
    (b"{}", 422, "lacks the column 'area'"),
    (b'[{"\\ud800": 1}]', 422, "lacks the column 'area'"),
]


@pytest.mark.parametrize(("body", "status", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_body_is_refused_in_one_sentence(body, status, message, model):
    answer = model.post(body)
    assert answer.status_code == status
    assert message in answer.json()["error"]
    assert model.client.get("/health").json()["ready"] is True


def test_infinite_numbers_are_refused(model):
    body = json.dumps(model.row).replace(f'"area": {model.row["area"]}', '"area": 1e999')
    assert "'area' must hold a number, or null, got the number inf instead" in model.post(body).json()["error"]


@pytest.mark.parametrize("coverage", ["0", "1", "nan", "inf", "much", "", "-0.5"])
def test_a_coverage_that_is_no_probability_is_refused(coverage, model):
    answer = model.post(model.row, f"?coverage={coverage}")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("The parameter coverage must lie between 0 and 1, got ")


def test_a_request_that_is_too_large_or_no_json_is_refused(model):
    small = Client(serving.make_app(model.estimator, max_bytes=2000, max_rows=3))

    def post(body, **headers):
        return small.post("/predict", content=body, headers=JSON | headers)

    large = post(b" " * 2001)
    assert (large.status_code, large.json()["error"][:36]) == (413, "The body has more than 2,000 bytes; ")
    assert post(b" " * 100_000).status_code == 413

    async def pieces():
        for _ in range(3):
            yield b" " * 1500

    assert post(pieces()).status_code == 413  # without a declared length
    many = post(b"[1,2,3,4]")
    assert (many.status_code, many.json()["error"][:40]) == (413, "The body holds 4 rows, more than 3; send")
    assert post(json.dumps(model.row)).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = model.post(model.row, headers={"content-type": kind})
        assert answer.status_code == 415
        assert "with the header Content-Type: application/json" in answer.json()["error"]


def test_other_paths_and_methods_are_refused_in_one_sentence(model):
    for path in ("/", "/predict/", "/docs", "/%00", "/predict%0d%0ax", "//model"):
        answer = model.client.get(path)
        assert answer.status_code in (404, 405)
        assert answer.json()["error"].endswith(("/openapi.json.", "GET."))
    answer = model.client.get("/predict")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "access-control-allow-origin" not in answer.headers


def test_a_failure_is_one_sentence_without_a_traceback(model, monkeypatch):
    def fail(*_):
        raise errors.pop()

    errors = [MemoryError(), RuntimeError("secret")]
    monkeypatch.setattr(serving.Predictor, "answer", fail)
    client = Client(serving.make_app(model.estimator))
    for status, sentence in ((500, "The server failed; its log says why."), (503, "There is not enough memory ")):
        answer = client.post("/predict", json=model.row)
        assert answer.status_code == status
        assert answer.json()["error"].startswith(sentence)


def test_nothing_is_reported_to_anyone(model, monkeypatch):
    """FastAPI would report requests and failures to a provider of OpenTelemetry, where the process has one."""

    class Provider:
        def get_tracer(self, *_, **__):
            raise AssertionError("a request is reported")

    trace = pytest.importorskip("opentelemetry.trace")
    monkeypatch.setattr(trace, "get_tracer_provider", Provider)
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    assert Client(serving.make_app(model.estimator)).post("/predict", json=model.row).status_code == 200


def test_a_request_that_the_end_cuts_off_is_counted(model):
    """As after a second Ctrl-C: the task of the request is cancelled, and no traceback is written."""
    app, sent = serving.make_app(model.estimator), []

    async def send(message):
        sent.append(message)

    async def cut():
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        request = asyncio.create_task(app(scope, lambda: asyncio.sleep(60), send))
        await asyncio.sleep(0.05)
        request.cancel()
        await request

    asyncio.run(cut())
    assert app.state.counts.cut_off == 1
    assert sent[0]["status"] == 503
    assert sent[1]["body"] == b'{"error":"The server has been stopped."}'


def test_more_requests_than_may_wait_are_refused(model, monkeypatch):
    monkeypatch.setattr(serving, "MAX_WAITING", 0)
    answer = model.post(model.row)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"error": "Too many requests at once; try again."}
    assert model.client.get("/health").status_code == 200  # who watches the server must not take it for dead


def test_a_body_that_does_not_come_is_refused(monkeypatch):
    monkeypatch.setattr(serving, "BODY_SECONDS", 0.01)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    request = Request(scope, receive=lambda: asyncio.sleep(60))
    with pytest.raises(RequestError, match=r"did not arrive within 0\.01 seconds") as caught:
        asyncio.run(serving.read_body(request, 100))
    assert caught.value.status == 408


# ------------------------------------------------------------------ what the service says of itself


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_the_documents_show_the_real_columns_with_examples_that_work(kind, models):
    model = models[kind]
    about = model.client.get("/model").json()
    assert about["target"] == model.estimator.target_.name
    assert [column["name"] for column in about["columns"]] == ["area", "price", "kind", "garden", "sold", "age"]
    assert about["columns"][2]["note"] == "3 categories"
    assert ("classes" in about) == (kind == "classes")
    operation = model.client.get("/openapi.json").json()["paths"]["/predict"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    row = body["schema"]["oneOf"][0]
    assert row["required"] == list(model.row)
    assert row["properties"]["area"]["type"] == ["number", "string", "null"]
    assert row["properties"]["sold"]["examples"] == [model.row["sold"]]
    assert [p["name"] for p in operation["parameters"]] == ["coverage"]
    assert {"200", "400", "413", "415", "422", "503"} <= set(operation["responses"])
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    prediction = answered["predictions"]["items"]["oneOf"][0]
    for example in body["examples"].values():
        answer = model.post(example["value"])
        assert answer.status_code == 200
        assert answer.json()["errors"] == answer.json()["notes"] == []
        assert set(answer.json()["predictions"][0]) == set(prediction["required"])


def test_the_metrics_count_requests_rows_and_flags(model):
    client = Client(serving.make_app(model.estimator))
    client.post("/predict", json=[model.row, {**model.row, "area": 1e6}, 5])
    client.post("/predict", json=5)
    client.get("/a" * 50)
    text = client.get("/metrics").text
    assert 'bochner_requests_total{path="/predict",status="200"} 1\n' in text
    assert 'bochner_requests_total{path="/predict",status="422"} 1\n' in text
    assert 'bochner_requests_total{path="other",status="404"} 1\n' in text
    for kind, count in (("answered", 2), ("refused", 1), ("flagged", 1)):
        assert f"# TYPE bochner_rows_{kind}_total counter\nbochner_rows_{kind}_total {count}\n" in text
    buckets = [int(number) for number in re.findall(r'_bucket\{le="[\d.+Inf]+"\} (\d+)', text)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    assert "bochner_predict_seconds_count 2\n" in text
    assert re.search(r"bochner_predict_seconds_sum 0\.\d+\n", text)


# ------------------------------------------------------------------ the command


def run(*arguments):
    return CliRunner().invoke(commands, ["serve", *map(str, arguments)])


def test_what_cannot_be_served_is_said_in_one_line_before_it_listens(model, tmp_path, monkeypatch):
    x = np.linspace(0, 1, 20)[:, None]
    arrays = save(tmp_path / "arrays.bochner", StationaryRegressor(**OPTIONS).fit(x, x[:, 0]))
    (tmp_path / "text.bochner").write_text("hello")
    monkeypatch.setattr(server, "run", lambda *_, **__: pytest.fail("it must not listen"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        refusals = [
            ([tmp_path / "none.bochner"], "does not exist; give a model file."),
            ([tmp_path], "is a folder, not a file; give a model file."),
            ([tmp_path / "text.bochner", "--port", 0], "text.bochner "),
            ([arrays, "--port", 0], "was not fitted from a table"),
            ([model.path, "--port", taken], f"The port {taken} of 127.0.0.1 is taken; choose another with --port"),
            ([model.path, "--port", 65536], "The option --port must lie between 0 and 65535, got 65536 instead."),
            ([model.path, "--port", -1], "The option --port must lie between 0 and 65535, got -1 instead."),
            (
                [model.path, "--host", "no such host", "--port", 0],
                "The option --host must be an address of this machine",
            ),
            ([model.path, "--host", "192.0.2.1", "--port", 0], "The option --host must be an address of this machine"),
            ([model.path, "--max-megabytes", "nan"], "The option --max-megabytes must be above 0 and up to 1000"),
            ([model.path, "--max-rows", 0], "The option --max-rows must lie between 1 and 1000000, got 0 instead."),
        ]
        for arguments, message in refusals:
            result = run(*arguments)
            assert result.exit_code == 1
            assert message in result.stderr
            assert result.stderr.count("\n") == 1, result.stderr
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "bochner.serving.server")
    monkeypatch.delitem(sys.modules, "bochner.serving.app")
    monkeypatch.delattr("bochner.serving.server", raising=False)
    result = run(model.path)
    assert result.stderr.startswith("bochner serve needs the extra serve (fastapi is not installed): pip install ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals are of POSIX")
def test_a_signal_ends_the_server_after_what_is_in_flight(model):
    """A request whose body is half there when SIGTERM comes is answered; new ones are not; the exit code is 143."""
    command = [sys.executable, "-m", "bochner.cli", "serve", str(model.path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().rsplit(":", 1)[1].split(";")[0])
        body = json.dumps(model.row).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with (
            socket.create_connection(("127.0.0.1", port)) as waiting,
            socket.create_connection(("127.0.0.1", port)) as idle,
        ):
            waiting.sendall(head.encode() + body[:20])
            assert httpx.get(f"http://127.0.0.1:{port}/health").json()["model"] == "m.bochner"
            process.send_signal(signal.SIGTERM)
            assert idle.recv(100) == b""  # connections without a request are closed
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            waiting.sendall(body[20:])
            answer = b"".join(iter(lambda: waiting.recv(100_000), b""))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["errors"] == []
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert said == "bochner: stopped by SIGTERM; every request that had come was answered\n"


# ------------------------------------------------------------------ what a hostile reader found


def test_an_object_of_many_keys_is_refused_at_once(model):
    pairs = ",".join(f'"k{number}":0' for number in range(100_000))
    began = time.perf_counter()
    answer = model.post(f'{{{pairs},"k99999":1}}')
    assert answer.status_code == 400
    assert "has the key 'k99999' more than once" in answer.json()["error"]
    assert time.perf_counter() - began < 5  # seconds; it took minutes


@pytest.mark.parametrize("coverage", ["0.9999999999999999", "1", "0"])
def test_a_coverage_without_an_upper_end_is_refused(coverage, model):
    answer = model.post([model.row], f"?coverage={coverage}")
    assert answer.status_code == 422
    assert "must lie between 0 and 1" in answer.json()["error"]
    with pytest.raises(ValueError, match="coverage parameter must lie between 0 and 1"):
        model.estimator.predict_interval(flats(3)[0], coverage=float(coverage))


def test_a_client_that_hangs_up_is_no_failure_of_the_server():
    async def hang_up():
        messages = iter([{"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.disconnect"}])

        async def receive():
            return next(messages)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
        await serving.read_body(Request(scope, receive), 1000)

    with pytest.raises(RequestError, match="hung up") as caught:
        asyncio.run(hang_up())
    assert caught.value.status == 499


@pytest.mark.parametrize("coverage", [0.9, 0.999999])
def test_answers_agree_at_training_rows_and_beside_them(coverage, models):
    for model in models.values():
        estimator = model.estimator.estimator_
        fast, inputs = quick(estimator), estimator._inputs(model.estimator.clean(flats()[0]))
        with one_thread(), torch.inference_mode():
            for rows in (inputs, inputs + 1e-3, 2 * inputs, inputs.flip(0) * 0.7):
                exact, found = (forecast(e, rows, coverage=coverage) for e in (estimator, fast))
                unit = 1.0 if hasattr(estimator, "classes_") else exact.values[:, 1:2]
                assert (abs(exact.values - found.values) <= 1e-4 * unit).all()
                assert ((exact.scores > estimator.ood_threshold_) == (found.scores > estimator.ood_threshold_)).all()
