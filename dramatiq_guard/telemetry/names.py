"""Every span, metric and attribute name that the library exports, and nothing else.

What OpenTelemetry's messaging conventions name has their names (1.44.0); everything of our own is below
``dramatiq_guard.`` or ``dramatiq.``, never below ``messaging.``.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "dramatiq_guard"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

#: The value of ``messaging.system``: the library, since one application may reach it over several brokers.
SYSTEM_NAME: Final = "dramatiq"

# -- attributes of the conventions ---------------------------------------------------------------------------------

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
MESSAGE_ID: Final = "messaging.message.id"
ERROR_TYPE: Final = "error.type"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# -- attributes of our own -----------------------------------------------------------------------------------------

ACTOR: Final = "dramatiq.actor.name"
ATTEMPT: Final = "dramatiq.message.attempt"
OUTCOME: Final = "dramatiq_guard.outcome"
VERDICT: Final = "dramatiq_guard.verdict"
RULE: Final = "dramatiq_guard.rule"
WHY: Final = "dramatiq_guard.why"
DELAY: Final = "dramatiq_guard.delay"
STRATEGY: Final = "dramatiq_guard.strategy"
CAPPED: Final = "dramatiq_guard.capped"
RETRY_AFTER: Final = "dramatiq_guard.retry_after"
REASON: Final = "dramatiq_guard.reason"
FINGERPRINT: Final = "dramatiq_guard.fingerprint"
SENT: Final = "dramatiq_guard.settle.sent"
HOLDS: Final = "dramatiq_guard.settle.holds"
HELD: Final = "dramatiq_guard.settle.held"
PART: Final = "dramatiq_guard.settle.part"
DB_SYSTEM: Final = "db.system.name"
FENCE: Final = "dramatiq_guard.idempotency.fence"
DOWNSTREAM: Final = "dramatiq_guard.downstream"
BREAKER: Final = "dramatiq_guard.breaker.mode"
KEY_OPERATION: Final = "dramatiq_guard.idempotency.operation"
BOUND: Final = "dramatiq_guard.retention.bound"

# -- spans ---------------------------------------------------------------------------------------------------------

SPAN_CLASSIFY: Final = "dramatiq_guard.classify"
SPAN_BACKOFF: Final = "dramatiq_guard.backoff"
SPAN_SETTLE: Final = "dramatiq_guard.settle"
SPAN_DEAD_LETTER: Final = "dramatiq_guard.dead_letter"
SPAN_CRASH: Final = "dramatiq_guard.crash"
SPAN_SHUTDOWN: Final = "dramatiq_guard.shutdown"
SPAN_BREAKER: Final = "dramatiq_guard.breaker"
SPAN_CLAIM: Final = "dramatiq_guard.idempotency.claim"
SPAN_COMPLETE: Final = "dramatiq_guard.idempotency.complete"
SPAN_RELEASE: Final = "dramatiq_guard.idempotency.release"
SPAN_STEP: Final = "dramatiq_guard.idempotency.step"
SPAN_REPLAY: Final = "dramatiq_guard.replay"

#: The event, and the log record, of an exception.
EVENT_EXCEPTION: Final = "exception"
LOG_EXCEPTION: Final = "messaging.process.exception"

# -- metrics -------------------------------------------------------------------------------------------------------

SENT_MESSAGES: Final = "messaging.client.sent.messages"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
PROCESS_DURATION: Final = "messaging.process.duration"
OPERATION_DURATION: Final = "messaging.client.operation.duration"
WAIT_DURATION: Final = "dramatiq_guard.message.wait.duration"
IN_FLIGHT: Final = "dramatiq_guard.messages.in_flight"
CLASSIFIED_EXCEPTIONS: Final = "dramatiq_guard.classified.exceptions"
RETRY_DELAY: Final = "dramatiq_guard.retry.delay"
DEAD_LETTER_MESSAGES: Final = "dramatiq_guard.dead_letter.messages"
DEAD_LETTER_PURGED: Final = "dramatiq_guard.dead_letter.purged"
SETTLEMENT_HELD: Final = "dramatiq_guard.settle.settlement.held"
CRASHES: Final = "dramatiq_guard.crashes"
CRASHES_UNCOUNTED: Final = "dramatiq_guard.crashes.uncounted"
JOBS_STUCK: Final = "dramatiq_guard.jobs.stuck"
QUARANTINED_MESSAGES: Final = "dramatiq_guard.quarantined.messages"
BREAKER_STATE: Final = "dramatiq_guard.breaker.state"
KEY_DECISIONS: Final = "dramatiq_guard.idempotency.decisions"
KEY_DURATION: Final = "dramatiq_guard.idempotency.operation.duration"
SHUTDOWN_DURATION: Final = "dramatiq_guard.shutdown.duration"

# How a worker process ends.
EXIT_CODE: Final = "process.exit.code"
SHUTDOWN_IN_FLIGHT: Final = "dramatiq_guard.shutdown.in_flight"
SHUTDOWN_FINISHED: Final = "dramatiq_guard.shutdown.finished"
SHUTDOWN_INTERRUPTED: Final = "dramatiq_guard.shutdown.interrupted"
SHUTDOWN_REQUEUED: Final = "dramatiq_guard.shutdown.requeued"
SHUTDOWN_ABANDONED: Final = "dramatiq_guard.shutdown.abandoned"
