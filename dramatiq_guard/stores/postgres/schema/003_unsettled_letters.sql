-- Letters whose message the broker has not been told to bury yet: it may be delivered again, and succeed.

CREATE TABLE {schema}.unsettled_letters (
    letter_id   text COLLATE "C" PRIMARY KEY,
    message_id  text NOT NULL,
    died_at     bigint NOT NULL
);

CREATE INDEX unsettled_letters_by_death ON {schema}.unsettled_letters (died_at, letter_id);
