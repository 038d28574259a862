"""Short names of tasks, by hand."""

import pytest

from vla_rl.common.tables import short_names


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        (["push_to_zone", "stack"], ["push_to_zone", "stack"]),
        (
            ["pick_up_the_milk_and_place_it_in_the_big_basket", "pick_up_the_red_soup_and_place_it_in_the_big_basket"],
            ["milk", "red soup"],
        ),
        (
            ["put the bowl and then the second plate on the stove", "put the bowl and then the second plate"],
            ["plate on stove", "plate"],
        ),
        (["pick_up_the_very_small_salad_dressing_and_place_it_in_the_tray"], ["very small salad dressing in tray"]),
        # Without the filling word the two would be one.
        (
            [
                "alpha put the yellow and white mug on the middle plate",
                "beta",
                "alpha yellow white mug on middle plate",
            ],
            ["alpha put yellow and white mug on middle plate", "beta", "alpha yellow white mug on middle plate"],
        ),
    ],
)
def test_short_names_by_hand(tasks, names):
    assert short_names(tasks) == names


def test_no_name_is_empty_or_shared():
    tasks = ["the the the the the the the the the", "put the put the put the put the put the put", "the"]
    names = short_names(tasks)
    assert all(names) and len(set(names)) == 3
