-- The checkpoint, its leader and its history, all in one schema of their own.
-- Runs on Postgres 15 to 18 as a role without superuser rights that owns its database.

CREATE SCHEMA IF NOT EXISTS muster;

CREATE TABLE muster.schema_migrations (
    version    integer     PRIMARY KEY,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE muster.schema_migrations IS 'Which migrations ran; a controller refuses a database that had others than its own.';

CREATE TABLE muster.leader (
    singleton        boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
    controller_id    text        NOT NULL,
    epoch            bigint      NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    writes           bigint      NOT NULL
);
COMMENT ON TABLE muster.leader IS 'The one lease of leadership, judged by this server''s clock.';
COMMENT ON COLUMN muster.leader.singleton IS 'Always true: there is one row.';
COMMENT ON COLUMN muster.leader.controller_id IS 'Who leads, or led last; empty before the first.';
COMMENT ON COLUMN muster.leader.epoch IS 'Number of the term; rises with every change of leader and fences every write.';
COMMENT ON COLUMN muster.leader.lease_expires_at IS 'From then on another controller may take over.';
COMMENT ON COLUMN muster.leader.writes IS
    'Counts the changes of the checkpoint. A leader that finds another number than it left was not the last to write: the database was restored.';
INSERT INTO muster.leader (controller_id, epoch, lease_expires_at, writes) VALUES ('', 0, '-infinity', 0);

CREATE TABLE muster.checkpoint_rows (
    kind           text        NOT NULL,
    key            text        NOT NULL,
    schema_version integer     NOT NULL,
    value          json        NOT NULL,
    epoch          bigint      NOT NULL,
    updated_at     timestamptz NOT NULL,
    PRIMARY KEY (kind, key)
);
COMMENT ON TABLE muster.checkpoint_rows IS 'What the controller must not forget: one row per object.';
COMMENT ON COLUMN muster.checkpoint_rows.kind IS 'What sort of object: backend, endpoint, replica, goal and so on.';
COMMENT ON COLUMN muster.checkpoint_rows.key IS 'The object''s name within its kind.';
COMMENT ON COLUMN muster.checkpoint_rows.schema_version IS 'Format of value; one that the code does not know is refused.';
COMMENT ON COLUMN muster.checkpoint_rows.value IS
    'json and not jsonb: kept to the letter. jsonb refuses the escape of NUL, which a traceback or a user''s configuration may hold, and rewrites numbers.';
COMMENT ON COLUMN muster.checkpoint_rows.epoch IS 'Term of the leader that wrote the row last.';

CREATE TABLE muster.history (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    epoch   bigint      NOT NULL,
    verb    text        NOT NULL,
    subject text        NOT NULL,
    goal_id text,
    request json        NOT NULL,
    principal text        NOT NULL,
    old     json,
    new     json
);
COMMENT ON TABLE muster.history IS 'Who asked for what and when: the audit log. Bounded; the oldest rows are deleted.';
COMMENT ON COLUMN muster.history.at IS 'By the controller''s clock.';
COMMENT ON COLUMN muster.history.subject IS 'What it was about, such as a backend tag.';
COMMENT ON COLUMN muster.history.request IS 'The command as it was accepted.';
COMMENT ON COLUMN muster.history.principal IS 'As the client says of itself; empty when it does not.';
COMMENT ON COLUMN muster.history.old IS 'What was changed, as it was; null for what was not there.';
COMMENT ON COLUMN muster.history.new IS 'The same as it is then; null for what is gone.';
CREATE INDEX history_subject_id ON muster.history (subject, id);
