"""Replies that were paid for, by the content of the request."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from composer_core.protocols import TeacherReply
from composer_core.teachers.database import Database


def cache_key(identity: str, body: Mapping[str, Any], sample: int) -> str:
    """sha256 over who is asked (base URL, model), the canonical request body, and which sample of it this is."""
    text = json.dumps([identity, body, sample], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class ReplyCache:
    """Looks replies up and keeps them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, key: str) -> TeacherReply | None:
        """A stored reply, or None."""
        rows = self._database.read("SELECT reply FROM replies WHERE key = ?", key)
        return TeacherReply(**json.loads(str(rows[0][0]))) if rows else None

    def put(self, key: str, reply: TeacherReply, *, within: sqlite3.Connection) -> None:
        """Keep a reply, in the transaction that also books its cost: either both or neither is there."""
        text = json.dumps(reply.as_json(), ensure_ascii=False)
        within.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, text, time.time()))
