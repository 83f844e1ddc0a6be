-- A leader notices that the database was restored to an earlier state, also where its epoch is the same as then.

ALTER TABLE muster.leader ADD COLUMN writes bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN muster.leader.writes IS
    'Counts the changes of the checkpoint. A leader that finds another number than it left was not the last to write: the database was restored.';
