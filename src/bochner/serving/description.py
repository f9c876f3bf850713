"""What the service says of its model: the columns, examples of rows, and the OpenAPI document."""

from typing import Any

import pandas as pd

from bochner.errors import printable
from bochner.tables.columns import Column

EXAMPLE_DIGITS = 3  # significant digits of numbers in examples
EXAMPLE_TIME = "12:30"
TYPES = {  # JSON types that a cell may have beside null, by the kind of its column
    "number": ["number", "string"],
    "truth": ["boolean", "string", "number"],
    "date": ["string"],
    "time": ["string"],
    "category": ["string", "number", "boolean"],
    "text": ["string", "number"],
}


def describe_model(estimator: Any) -> dict[str, Any]:
    """The answer to GET /model: the target, the columns and how each is read."""
    target, table = estimator.target_, estimator.table_
    answer: dict[str, Any] = {"target": target.name, "task": target.task}
    if hasattr(estimator.estimator_, "classes_"):
        answer["classes"] = [str(name) for name in estimator.estimator_.classes_]
    answer["columns"] = [
        {"name": column.name, "kind": column.kind, "note": printable(column.note), "example": example}
        for column, example in zip(table.used, example_row(estimator).values(), strict=True)
    ]
    answer["ood_threshold"] = estimator.ood_threshold_
    answer["summary"] = [printable(line) for line in estimator.summary_]
    return answer


def example_row(estimator: Any) -> dict[str, Any]:
    """A row that the model can answer: means of numbers, frequent categories, the first date."""
    learnt = {column.name: column for column in estimator.estimator_.columns_.columns}
    names = estimator.table_.outputs
    by_output = dict(zip(names, learnt.values(), strict=True))
    return {column.name: _example(column, by_output) for column in estimator.table_.used}


def _example(column: Column, by_output: dict[str, Any]) -> Any:
    if column.kind == "number":
        return float(f"{by_output[column.name].mean:.{EXAMPLE_DIGITS}g}")
    if column.kind == "category":
        learnt = by_output[column.name]
        return max(zip(learnt.shares, learnt.categories, strict=True))[1]
    if column.kind == "date":
        first = pd.Timestamp(column.first)
        return first.isoformat() if column.style in ("", "ISO8601") else first.strftime(column.style)
    if column.kind == "time":
        return pd.Timestamp(f"2000-01-01 {EXAMPLE_TIME}").strftime(column.style) if column.style else EXAMPLE_TIME
    return True if column.kind == "truth" else " ".join(column.parts[:3])


def row_schema(estimator: Any) -> dict[str, Any]:
    """The JSON schema of a row."""
    example = example_row(estimator)
    properties = {}
    for column in estimator.table_.used:
        properties[column.name] = {
            "type": [*TYPES[column.kind], "null"],
            "description": printable(column.note),
            "examples": [example[column.name]],
        }
    return {"type": "object", "title": "Row", "required": list(properties), "properties": properties}


def prediction_schema(estimator: Any) -> dict[str, Any]:
    """The JSON schema of the prediction of a row."""
    number = {"type": "number"}
    properties: dict[str, Any] = dict.fromkeys(("mean", "std", "low", "high"), number)
    if hasattr(estimator.estimator_, "classes_"):
        classes = [str(name) for name in estimator.estimator_.classes_]
        probabilities = {"type": "object", "properties": dict.fromkeys(classes, number)}
        properties = {"predicted": {"description": "The most probable class."}, "probabilities": probabilities}
    properties["ood_score"] = {"type": "number", "minimum": 0, "maximum": 1}
    properties["ood"] = {"type": "boolean", "description": "Whether the row is unlike the training data."}
    return {"type": "object", "title": "Prediction", "required": list(properties), "properties": properties}


def predict_operation(estimator: Any) -> dict[str, Any]:
    """What the OpenAPI document says of POST /predict: the body, the answer, the refusals."""
    row, example = row_schema(estimator), example_row(estimator)
    error = {"type": "object", "properties": {"row": {"type": "integer"}, "column": {}, "error": {"type": "string"}}}
    prediction = {"oneOf": [prediction_schema(estimator), {"type": "null"}]}
    answer = {
        "type": "object",
        "properties": {
            "predictions": {"type": "array", "items": prediction},
            "errors": {"type": "array", "items": error},
            "notes": {"type": "array", "items": {"type": "string"}},
        },
    }
    examples = {"one row": {"value": example}, "several rows": {"value": [example, example]}}
    body = {"schema": {"oneOf": [row, {"type": "array", "items": row}]}, "examples": examples}
    refusal = {
        "type": "object",
        "properties": {"error": {"type": "string"}, "errors": {"type": "array", "items": error}},
    }
    refusals = {
        "400": "The body is not JSON.",
        "413": "The body or the number of rows is too large.",
        "415": "The body is not declared as application/json.",
        "422": "No row can be used, or a parameter is wrong.",
        "503": "Too many requests at once.",
    }
    responses: dict[str, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": refusal}}}
        for status, text in refusals.items()
    }
    answered = "At least one row is answered; a bad row has null in its place and its error in errors."
    responses["200"] = {"description": answered, "content": {"application/json": {"schema": answer}}}
    return {"requestBody": {"required": True, "content": {"application/json": body}}, "responses": responses}
