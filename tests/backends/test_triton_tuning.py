"""RELPOS_TRITON_TUNE=1: sizes of blocks by trial."""

import pytest
import torch

from conformance.cases import Case, attend, case, make, outcome
from relpos.backends.triton import backend as triton

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(triton.UNAVAILABLE is not None, reason=f"triton: {triton.UNAVAILABLE}"),
]

if triton.UNAVAILABLE is None:
    from relpos.backends.triton import launch, sizes, tuning


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tune, and time each run by a clock of its own that says that the second is the fastest."""
    times: list[float] = []

    def timer(run, quantiles) -> list[float]:
        run()
        times.append(1.0 if len(times) % 2 else 2.0)
        return [times[-1]] * len(quantiles)

    tuning.tuner.cache_clear()
    tuned = tuning.tuner
    monkeypatch.setattr(tuning, "IS_WANTED", True)
    monkeypatch.setattr(tuning, "tuner", lambda name: tuned(name, timer))
    yield times
    tuned.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        case("length 17"),
        case("relations for pairs"),
        Case("grouped", heads=4, key_heads=2),
        case("mask: bool"),
    ],
    ids=str,
)
def test_what_was_tuned_equals_the_reference(case: Case, timed: list[float]) -> None:
    arguments = make(case, torch.float32)
    for _ in range(2):
        found = outcome(*attend("triton", arguments), arguments)
        truth = outcome(*attend("reference", arguments), arguments)
        for name, x in truth.items():
            torch.testing.assert_close(
                found[name], x, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    kind = launch.Call(*[arguments["query"]] * 3, *[None] * 5, 0, None, 0, 0, False, None, 0.0, 1.0).kind
    kind = kind._replace(is_general="relations" in arguments or arguments["attn_mask"] is not None)
    kind = kind._replace(is_grouped=case.name == "grouped", has_one_table=False)
    wanted = [sizes.candidates(name, kind) for name in sizes.CANDIDATES]
    # the second call tried nothing
    assert len(timed) == sum(len(some) for some in wanted)


def test_a_tile_holds_a_pair_for_each_thread_of_every_candidate() -> None:
    assert len(list(sizes.kinds())) == 8 * 16
    for name in sizes.CANDIDATES:
        for kind in sizes.kinds():
            some = sizes.candidates(name, kind)
            assert some
            for size in some:
                along = size.keys if name == "key_value_gradients" else size.queries
                assert along * size.near >= 32 * size.warps, (name, size)
                assert size.queries % size.near == size.keys % size.near == 0
