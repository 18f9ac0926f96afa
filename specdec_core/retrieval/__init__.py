"""The datastore of retrieval-based speculative decoding (REST, He et al., 2024)."""

from specdec_core.retrieval.build import write_datastore
from specdec_core.retrieval.card import DatastoreCard
from specdec_core.retrieval.datastore import (
    Datastore,
    Matches,
    check_datastores,
    open_datastore,
    resolve_datastore,
)

__all__ = [
    "Datastore",
    "DatastoreCard",
    "Matches",
    "check_datastores",
    "open_datastore",
    "resolve_datastore",
    "write_datastore",
]
