"""Columns as inputs: numbers, categories, booleans, texts, and what was never seen."""

import numpy as np
import pandas as pd
import pytest

from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.estimators.base import merge_equal_rows
from bochner.estimators.columns import Columns, as_codes, is_category

QUICK = {"hidden_layer_sizes": (), "random_state": 0, "kernel": "matern32"}
ONE = np.ones(4)


def learn(table, weight=None, unseen_rows=0.5):
    return Columns.learn(table, np.ones(len(table)) if weight is None else weight, unseen_rows)


def frame(num=120, seed=0):
    """Numbers, a text that matters and a boolean; and targets."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "size": rng.normal(size=num) * 30 + 100,
            "kind": rng.choice(["a", "b", "c"], num),
            "new": rng.random(num) < 0.5,
        }
    )
    level = table["kind"].map({"a": -2.0, "b": 0.0, "c": 2.5}).to_numpy(dtype=np.float64)
    y = level + (table["size"].to_numpy() - 100) / 30 + 0.5 * table["new"].to_numpy() + 0.1 * rng.normal(size=num)
    return table, y


@pytest.fixture(scope="module")
def fitted():
    return StationaryRegressor(**QUICK).fit(*frame())


# ------------------------------------------------------------------ numbers


def test_numbers_are_standardised_with_weights():
    x = np.random.default_rng(0).normal(size=(30, 3)) * [1, 50, 1e-6] + [0, 3, 1e-5]
    weight = np.linspace(0.5, 3, 30)
    found = learn(x, weight).transform(x)
    mean = np.average(x, axis=0, weights=weight)
    std = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weight))
    np.testing.assert_allclose(found, (x - mean) / std, rtol=1e-10)


def test_a_constant_column_keeps_its_scale():
    columns = learn(np.full((4, 1), 0.1))
    np.testing.assert_allclose(columns.transform(np.array([[0.1], [1.1]])), [[0], [1]], atol=1e-12)


def test_missing_numbers_lie_at_the_mean_with_an_input_that_says_so():
    x = np.array([[1.0], [3.0], [np.nan], [5.0]])
    columns = learn(x)
    found = columns.transform(x)
    std = np.sqrt(8 / 3)
    np.testing.assert_allclose(found[:, 0], np.array([-2, 0, 0, 2]) / std)
    share = 0.25
    np.testing.assert_allclose(found[:, 1], (np.isnan(x[:, 0]) - share) / np.sqrt(share * (1 - share)))
    assert columns.group.tolist() == [0, 0]
    assert columns.plain == 2


def test_a_value_missing_in_a_column_that_was_complete_lies_far_away():
    x = np.random.default_rng(0).normal(size=(50, 2))
    columns = learn(x, unseen_rows=0.5)
    found = columns.transform(np.array([[np.nan, x[:, 1].mean()]]))
    share = 0.5 / 50
    np.testing.assert_allclose(found, [[1 / np.sqrt(share * (1 - share)), 0]], atol=1e-12)


def test_values_beyond_all_are_finite():
    columns = learn(np.array([[1.0], [2.0]]))
    assert columns.transform(np.array([[1e300], [-1e300]])).tolist() == [[1e6], [-1e6]]


def test_columns_without_values_and_beyond_size_are_refused():
    with pytest.raises(ValueError, match="Column 1 of X has no values; leave it out"):
        learn(np.array([[1.0, np.nan], [2.0, np.nan]]))
    with pytest.raises(ValueError, match=r"Column 0 of X holds values beyond 1e\+100 in size; rescale or clip it"):
        learn(np.array([[1.0], [1e101]]))


# ------------------------------------------------------------------ categories


def test_a_category_becomes_an_input_for_each_value_that_together_count_as_one():
    table = pd.DataFrame({"k": ["a"] * 5 + ["b"] * 3 + ["c"] * 2, "x": np.arange(10.0)})
    columns = learn(table)
    found = columns.transform(table)
    shares = np.array([0.5, 0.3, 0.2])
    onehot = np.eye(3)[[0] * 5 + [1] * 3 + [2] * 2]
    expected = (onehot - shares) / np.sqrt(shares * (1 - shares)) / np.sqrt(3)
    np.testing.assert_allclose(found[:, :3], expected)
    assert (found[:, :3] ** 2).mean(0).sum() == pytest.approx(1)  # the variance of a number
    assert columns.group.tolist() == [0, 0, 0, 1, 0]
    assert columns.plain == 4
    assert not found[:, 4].any()


def test_an_unseen_category_lies_in_the_middle_of_the_others_and_far_away_in_an_input_of_its_own():
    table = pd.DataFrame({"k": ["a"] * 5 + ["b"] * 5})
    found = learn(table).transform(pd.DataFrame({"k": ["z", "a"]}))
    share = 0.5 / 10
    np.testing.assert_allclose(found[0], [0, 0, 1 / np.sqrt(share * (1 - share))], atol=1e-12)
    assert found[1, -1] == 0


def test_missing_categories_are_one_more_category():
    table = pd.DataFrame({"k": ["a", None, "b", np.nan, "a", "b"]})
    columns = learn(table)
    assert columns.columns[0].categories == ("a", "b", "missing")
    found = columns.transform(table)
    np.testing.assert_array_equal(found[1], found[3])
    assert not found[:, -1].any()


def test_booleans_are_numbers_and_categories_are_what_pandas_says():
    table = pd.DataFrame(
        {
            "flag": [True, False, True, True],
            "kind": pd.Categorical(["x", "y", "x", "x"]),
            "text": ["p", "q", "q", "p"],
            "maybe": pd.array([1, None, 3, 4], dtype="Int64"),
        }
    )
    assert [is_category(table[name]) for name in table] == [False, True, True, False]
    columns = learn(table)
    assert [column.categories for column in columns.columns] == [None, ("x", "y"), ("p", "q"), None]
    np.testing.assert_allclose(columns.transform(table)[:, 0], (np.array([1, 0, 1, 1]) - 0.75) / np.sqrt(0.1875))
    assert columns.columns[3].missing == pytest.approx(0.25)


def test_names_and_free_text_are_refused():
    table = pd.DataFrame({"id": [f"n{number}" for number in range(30)], "x": np.arange(30.0)})
    message = "Column 'id' of X holds 30 different texts in 30 rows: names, identifiers or free text; leave it out"
    with pytest.raises(ValueError, match=message):
        StationaryRegressor(**QUICK).fit(table, np.arange(30.0))


def test_codes_tell_rows_apart():
    table = pd.DataFrame({"k": ["b", "a", "b"], "x": [1.0, 2.0, 1.0]})
    np.testing.assert_array_equal(as_codes(table), [[1, 1], [0, 2], [1, 1]])
    plain = np.arange(6.0).reshape(3, 2)
    assert as_codes(plain) is plain


def test_equal_rows_are_merged_and_their_order_does_not_matter():
    x = np.array([[1.0, np.nan], [0.0, 2.0], [1.0, np.nan], [-0.0, 2.0], [1.0, np.nan]])
    y = np.array([1.0, 2.0, 1.0, 2.0, 3.0])
    weight = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    first, total = merge_equal_rows(x, y, weight)
    assert sorted(total.tolist()) == [5, 10, 16]
    assert {(float(y[i]), float(w)) for i, w in zip(first, total, strict=True)} == {(1, 5), (2, 10), (3, 16)}
    back = np.arange(5)[::-1]
    again, weights = merge_equal_rows(x[back], y[back], weight[back])
    np.testing.assert_array_equal(y[back][again], y[first])
    np.testing.assert_array_equal(weights, total)


# ------------------------------------------------------------------ in the estimators


def test_categories_are_learnt_from(fitted):
    new, y = frame(100, seed=1)
    assert fitted.score(new, y) > 0.95
    assert list(fitted.feature_names_in_) == ["size", "kind", "new"]
    assert fitted.n_features_in_ == 3


@pytest.mark.parametrize("kind", [StationaryRegressor, StationaryClassifier])
def test_an_unseen_category_is_unlike_the_training_data(kind):
    table, y = frame()
    model = kind(**QUICK).fit(table, y if kind is StationaryRegressor else y > 0)
    new, _ = frame(100, seed=1)
    assert (model.ood_score(new) > model.ood_threshold_).mean() < 0.25
    strange = new.assign(kind="z")
    assert (model.ood_score(strange) > model.ood_threshold_).mean() >= 0.9
    if kind is StationaryRegressor:
        _, near = model.predict(new, return_std=True)
        mean, far = model.predict(strange, return_std=True)
        assert np.median(far) > 3 * np.median(near)
        assert abs(mean - y.mean()).mean() < abs(model.predict(new) - y.mean()).mean()


def test_a_value_missing_for_the_first_time_is_unlike_the_training_data(fitted):
    new, _ = frame(100, seed=1)
    strange = new.assign(size=np.nan)
    assert (fitted.ood_score(strange) > fitted.ood_threshold_).mean() >= 0.9
    std, plain = (fitted.predict(rows, return_std=True)[1] for rows in (strange, new))
    assert np.median(std) > 3 * np.median(plain)


def test_numbers_may_be_missing_in_training_and_later():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    y = x[:, 0] + 0.1 * rng.normal(size=120)
    y[::4] = 3.0  # what is missing says something
    x[::4, 0] = np.nan
    model = StationaryRegressor(**QUICK).fit(x, y)
    assert model.predict([[np.nan, 0.0], [1.0, 0.0]]) == pytest.approx([3, 1], abs=0.2)


def test_the_order_of_named_columns_does_not_matter(fitted):
    new, _ = frame(20, seed=1)
    turned = new[["new", "kind", "size"]].assign(further=1.0)
    np.testing.assert_array_equal(fitted.predict(turned), fitted.predict(new))


def test_the_order_of_numbers_is_scikit_learns_business():
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=["a", "b"])
    model = StationaryRegressor(**QUICK).fit(table, table["a"])
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        model.predict(table[["b", "a"]])


def test_the_index_of_a_table_does_not_matter(fitted):
    table, y = frame()
    again = StationaryRegressor(**QUICK).fit(table.set_index(np.arange(120)[::-1] + 7), y)
    np.testing.assert_array_equal(again.predict(table), fitted.predict(table))


def test_tables_that_differ_from_training_are_refused(fitted):
    new, _ = frame(10, seed=1)
    with pytest.raises(ValueError, match="X lacks the column 'kind' that was there in training"):
        fitted.predict(new.drop(columns="kind"))
    with pytest.raises(ValueError, match="X must be a DataFrame, as in training, for it has categories; got ndarray"):
        fitted.predict(np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"X has no rows: found array with 0 sample\(s\)"):
        fitted.predict(new[:0])
    with pytest.raises(ValueError, match="Column 'size' of X held numbers in training, and now holds text"):
        fitted.predict(new.assign(size="big"))


def test_text_where_all_columns_were_numbers_is_refused():
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=["a", "b"])
    model = StationaryRegressor(**QUICK).fit(table, table["a"])
    with pytest.raises(ValueError, match="Column 'b' of X held numbers in training, and now holds text"):
        model.predict(table.assign(b="x"))


def test_one_row_of_categories_is_not_enough():
    with pytest.raises(ValueError, match="At least 2 rows of X are needed, got n_samples = 1"):
        StationaryRegressor(**QUICK).fit(pd.DataFrame({"k": ["a"]}), [1.0])


def test_infinite_numbers_beside_categories_are_refused():
    table, y = frame(20)
    table.loc[3, "size"] = np.inf
    with pytest.raises(ValueError, match=r"Column 'size' of X holds values beyond 1e\+100"):
        StationaryRegressor(**QUICK).fit(table, y)


def test_categories_of_zero_weight_are_unseen():
    table, y = frame(60)
    weight = (table["kind"] != "c").to_numpy().astype(float)
    model = StationaryRegressor(**QUICK).fit(table, y, weight)
    assert model.columns_.columns[1].categories == ("a", "b")


def test_columns_may_have_numbers_as_names():
    table, y = frame(40)
    table.columns = [0, 1, 2]
    model = StationaryRegressor(**QUICK).fit(table, y)
    assert np.isfinite(model.predict(table)).all()


def test_two_columns_of_one_name_are_refused():
    table, y = frame(40)
    table.columns = ["size", "kind", "size"]
    with pytest.raises(ValueError, match="size"):
        StationaryRegressor(**QUICK).fit(table, y)


def test_numbered_categories_are_recognised_as_plain_numbers_too():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=60), "k": pd.Categorical(rng.integers(0, 3, 60))})
    y = table["k"].to_numpy() * 2.0 + table["x"].to_numpy()
    model = StationaryRegressor(**QUICK).fit(table, y)
    plain = table.assign(k=table["k"].astype(int))
    np.testing.assert_allclose(model.predict(plain), model.predict(table))


def test_a_category_that_is_missing_in_all_rows_is_the_missing_one():
    table, y = frame(60)
    table.loc[::3, "kind"] = None
    model = StationaryRegressor(**QUICK).fit(table, y)
    absent = table[table["kind"].isna()]
    np.testing.assert_allclose(model.predict(absent.assign(kind=np.nan)), model.predict(absent))
