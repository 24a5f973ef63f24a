"""The kill points, and what a message that is killed over at each must come to."""

from __future__ import annotations

__all__ = ["POINTS"]

#: The kill points, and the job that passes them.
POINTS = {
    "decided": "retried",
    "before-retry": "retried",
    "after-retry": "retried",
    "before-promote": "retried",
    "after-promote": "retried",
    "before-defer": "deferred",
    "after-defer": "deferred",
    "before-requeue": "interrupted",
    "after-requeue": "interrupted",
    "before-result": "succeeds",
    "after-result": "succeeds",
    "before-on_success": "succeeds",
    "after-on_success": "succeeds",
    "before-pipeline": "succeeds",
    "after-pipeline": "succeeds",
    "before-group": "succeeds",
    "after-group": "succeeds",
    "before-ack": "succeeds",
    "after-ack": "succeeds",
    "before-on_failure": "exhausted",
    "after-on_failure": "exhausted",
    "before-on_retry_exhausted": "exhausted",
    "after-on_retry_exhausted": "exhausted",
    "before-letter": "exhausted",
    "after-letter": "exhausted",
    "before-on_dead_letter": "exhausted",
    "after-on_dead_letter": "exhausted",
    "before-nack": "exhausted",
    "after-nack": "exhausted",
}
