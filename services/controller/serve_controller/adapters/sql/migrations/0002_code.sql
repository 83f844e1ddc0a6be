-- Uploaded code: rows are the truth, the bucket from which hosts fetch it is a cache.

CREATE TABLE muster.code (
    digest   text        PRIMARY KEY,
    pages    integer     NOT NULL,
    used_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE muster.code IS 'Uploaded code that is complete; kept while a version or a revision names it.';
COMMENT ON COLUMN muster.code.digest IS 'SHA-256 of the whole code, in hexadecimal.';
COMMENT ON COLUMN muster.code.used_at IS 'When it was last uploaded or deployed.';

CREATE TABLE muster.code_pages (
    digest   text        NOT NULL,
    page     integer     NOT NULL,
    data     bytea       NOT NULL,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (digest, page)
);
ALTER TABLE muster.code_pages ALTER COLUMN data SET STORAGE EXTERNAL;
COMMENT ON TABLE muster.code_pages IS 'The content of code, also of uploads that are not complete yet.';
