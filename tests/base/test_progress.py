from tqdm import tqdm as text_bar
from tqdm.notebook import tqdm_notebook

from dfm_nb.base.progress import tqdm


def test_a_bar_has_the_form_for_where_it_runs(monkeypatch):
    monkeypatch.setenv("DFM_HEADLESS", "1")
    with tqdm(range(2), disable=True) as bar:
        assert isinstance(bar, text_bar) and not isinstance(bar, tqdm_notebook) and list(bar) == [0, 1]
    monkeypatch.setenv("DFM_HEADLESS", "0")
    with tqdm(range(2), disable=True) as bar:
        assert isinstance(bar, tqdm_notebook) and list(bar) == [0, 1]
