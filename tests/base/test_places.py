"""Requests to servers: a URL that the user wrote is asked for as it is."""

import pytest

from dfm_nb.data.sources._fetch import fetched
from tests.servers import Quiet, serving


class Recording(Quiet):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("/moved", "/there"))
            return self.end_headers()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.parametrize(
    "written, asked",
    [
        ("/a.png?sig=a%2Fb%2bc+d%3D&t=%20", None),
        ("/a%2Fb.png", None),
        ("/a b/\u00e9 100%.png", "/a%20b/%C3%A9%20100%25.png"),
    ],
)
def test_a_url_is_asked_for_as_it_is_written(written, asked):
    with serving(Recording, asked=[]) as server:
        for place in ("", "/moved"):
            with fetched(f"{server.url}{place}{written}"):
                pass
    assert [path for path in server.asked if not path.startswith("/moved")] == [
        f"{place}{asked or written}" for place in ("", "/there")
    ]
