-- The audit log says who asked, and what it was before and after.

ALTER TABLE muster.history
    ADD COLUMN who text NOT NULL DEFAULT '',
    ADD COLUMN old json,
    ADD COLUMN new json;
COMMENT ON COLUMN muster.history.who IS 'As the client says of itself; empty when it does not, and in rows from before this column.';
COMMENT ON COLUMN muster.history.old IS 'What was changed, as it was; null for what was not there, and in rows from before this column.';
COMMENT ON COLUMN muster.history.new IS 'The same as it is then; null for what is gone.';
