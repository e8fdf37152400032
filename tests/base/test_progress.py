from tqdm.notebook import tqdm_notebook

from dfm_nb.base.progress import tqdm


def test_a_bar_has_the_form_for_where_it_runs(monkeypatch):
    for headless, in_notebook in (("1", False), ("0", True)):
        monkeypatch.setenv("DFM_HEADLESS", headless)
        with tqdm(range(2), disable=True) as bar:
            assert isinstance(bar, tqdm_notebook) == in_notebook and list(bar) == [0, 1]
