"""The bar of training moves within a step, by rows."""

from types import SimpleNamespace

from trl_ext.extension.training import _Progress


def rows_shown(forwards, rows_per_step, n_rows, begun=0):
    """Rows that the bar shows after each forward, of steps with so many of them."""
    progress = _Progress(n_rows, rows_per_step)
    state, shown = SimpleNamespace(global_step=begun, max_steps=begun + len(forwards)), []
    progress.on_train_begin(None, state, None)
    assert progress.bar.initial == progress.bar.n == begun * rows_per_step
    for of_step in forwards:
        for _ in range(of_step - 1):
            progress.on_substep_end(None, state, None)
            shown.append(progress.bar.n)
        state.global_step += 1
        progress.on_step_end(None, state, None)
        shown.append(progress.bar.n)
    progress.close()
    return shown


def test_every_row_of_a_step_moves_the_bar():
    assert rows_shown([3, 3, 1], rows_per_step=3, n_rows=7) == [1, 2, 3, 4, 5, 6, 7]


def test_short_rows_that_are_read_together_are_counted_by_the_end_of_the_step():
    assert rows_shown([1, 2], rows_per_step=3, n_rows=6) == [3, 4, 6]


def test_a_run_that_goes_on_begins_where_it_was():
    assert rows_shown([2, 2], rows_per_step=2, n_rows=8, begun=2) == [5, 6, 7, 8]
