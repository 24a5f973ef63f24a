-- Reads a record: its fields, and when it expires; false where there is none.

local record = known()
return record and {
  record[STATE], record[FENCE], record[ATTEMPTS], record[CRASHES], record[FIRST_CLAIM_AT], record[FINGERPRINT],
  record[FLAGS], record[RESULT], record[STEPS], record[LEASE_UNTIL] or 0, record[OWNER] or "",
  now + redis.call("PTTL", key),
}
