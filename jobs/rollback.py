"""Have a running server serve what it served before."""

from __future__ import annotations

from jobs.console import console, run
from jobs.deploy import Server, say


def main(url: Server = None) -> None:
    """Go back to the configuration before the last switch, without a pause. Where it is registered,
    it is the champion again."""
    # MLflow and torch take seconds to import.
    from cluster.serving.control import find_server
    from dashboards.tracking.registry import CHAMPION, appoint

    server = find_server(url)
    with console.status("loading it beside the one that is served"):
        served = server.roll_back()
    if served.version is not None:
        appoint(server.name, served.version, CHAMPION)
    say(server.url, served)


if __name__ == "__main__":
    run(main)
