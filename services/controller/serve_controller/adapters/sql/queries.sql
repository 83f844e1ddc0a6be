-- Every query of the controller, by name. `$n` are its parameters in the order that the comment lists.
-- Tables are found through the connection's search_path.

-- name: migrations_exist
-- Whether any migration ever ran.
SELECT to_regclass('muster.schema_migrations') IS NOT NULL;

-- name: run_migrations
-- The migrations that ran, in their order.
SELECT version, name FROM schema_migrations ORDER BY version;

-- name: note_migration
-- Record that a migration ran: version, name.
INSERT INTO schema_migrations (version, name) VALUES ($1, $2);

-- name: lock_migrations
-- Wait until no other controller migrates: lock key. Held until the connection closes.
SELECT pg_advisory_lock($1);

-- name: acquire_leadership
-- Begin a new term if the lease is over or already ours: controller_id, ttl in seconds, epoch that the new one must be
-- above. No row while another leads.
UPDATE leader
SET controller_id = $1,
    epoch = greatest(epoch, $3) + 1,
    lease_expires_at = clock_timestamp() + make_interval(secs => $2)
WHERE controller_id = $1 OR lease_expires_at <= clock_timestamp()
RETURNING epoch, writes;

-- name: renew_leadership
-- Prolong our term: controller_id, epoch, ttl in seconds, number of our last write or null. No row when another term has
-- begun or the database was restored to a state before that write.
UPDATE leader
SET lease_expires_at = clock_timestamp() + make_interval(secs => $3)
WHERE controller_id = $1 AND epoch = $2 AND ($4::bigint IS NULL OR writes >= $4::bigint)
RETURNING epoch;

-- name: release_leadership
-- End our lease now, if it is still ours: controller_id, epoch.
UPDATE leader
SET lease_expires_at = '-infinity'
WHERE controller_id = $1 AND epoch = $2;

-- name: load
-- The whole checkpoint as it is at one moment.
SELECT kind, key, schema_version, value FROM checkpoint_rows;

-- name: record
-- Write one change with its history if the epoch still leads, all of it or nothing; returns the number of the write.
-- One statement: there is no moment at which a stopped controller holds the lock on the leader row and blocks its
-- successor. `fence` waits for a takeover in progress and then sees its epoch; a takeover waits for this statement. It
-- also counts the write: where the number is not the one after our last, the database was restored meanwhile.
-- Parameters: 1 epoch; puts: 2 kinds, 3 keys, 4 schema versions, 5 values; deletes: 6 kinds, 7 keys;
-- history: 8 times, 9 principals, 10 verbs, 11 subjects, 12 goal ids, 13 requests, 14 old, 15 new;
-- 16 history rows kept, null to keep all; 17 number of our last write, null for any; 18 controller_id, null for any: a
-- database that was restored gives epochs again, also to another controller while we have yet to notice.
WITH fence AS (
    UPDATE leader SET writes = writes + 1
    WHERE epoch = $1 AND ($17::bigint IS NULL OR writes = $17::bigint)
        AND ($18::text IS NULL OR controller_id = $18::text)
    RETURNING epoch, writes
), put AS (
    INSERT INTO checkpoint_rows AS old (kind, key, schema_version, value, epoch, updated_at)
    SELECT new.kind, new.key, new.schema_version, new.value::json, fence.epoch, clock_timestamp()
    FROM fence, unnest($2::text[], $3::text[], $4::integer[], $5::text[]) AS new (kind, key, schema_version, value)
    ON CONFLICT (kind, key) DO UPDATE
    SET schema_version = excluded.schema_version,
        value = excluded.value,
        epoch = excluded.epoch,
        updated_at = excluded.updated_at
), deleted AS (
    DELETE FROM checkpoint_rows AS old
    USING fence, unnest($6::text[], $7::text[]) AS gone (kind, key)
    WHERE old.kind = gone.kind AND old.key = gone.key
), noted AS (
    INSERT INTO history (at, epoch, principal, verb, subject, goal_id, request, old, new)
    SELECT to_timestamp(line.at), fence.epoch, line.principal, line.verb, line.subject, line.goal_id,
        line.request::json, line.old::json, line.new::json
    FROM fence, unnest($8::float8[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[],
            $15::text[])
        WITH ORDINALITY AS line (at, principal, verb, subject, goal_id, request, old, new, place)
    ORDER BY line.place
), trimmed AS (
    DELETE FROM history USING fence
    WHERE $16::integer IS NOT NULL
        AND id <= (SELECT h.id FROM history AS h ORDER BY h.id DESC OFFSET $16::integer LIMIT 1)
)
SELECT writes FROM fence;

-- name: read_history
-- A page of the audit log, the newest first: rows at most, subject or null, id that all must be below or null, bytes at
-- most (but at least one row, so that a reader makes progress).
WITH page AS (
    SELECT id, at, principal, epoch, verb, subject, goal_id, request, old, new
    FROM history
    WHERE ($2::text IS NULL OR subject = $2) AND ($3::bigint IS NULL OR id < $3)
    ORDER BY id DESC
    LIMIT $1
), measured AS (
    SELECT *, row_number() OVER newest AS place,
        sum(octet_length(request::text) + coalesce(octet_length(old::text), 0) + coalesce(octet_length(new::text), 0))
            OVER newest AS bytes
    FROM page
    WINDOW newest AS (ORDER BY id DESC)
)
SELECT id, extract(epoch FROM at)::float8 AS at, principal, epoch, verb, subject, goal_id, request, old, new
FROM measured
WHERE place = 1 OR bytes <= $4
ORDER BY id DESC;

-- name: touch_code
-- Those of these digests that are complete, which count as used from now on: digests.
UPDATE code SET used_at = clock_timestamp() WHERE digest = ANY($1::text[]) RETURNING digest;

-- name: add_code_page
-- Write a page of an upload: digest, page, data.
INSERT INTO code_pages (digest, page, data) VALUES ($1, $2, $3)
ON CONFLICT (digest, page) DO UPDATE SET data = excluded.data, added_at = excluded.added_at;

-- name: complete_code
-- Declare an upload complete: digest, number of pages.
INSERT INTO code (digest, pages) VALUES ($1, $2)
ON CONFLICT (digest) DO UPDATE SET used_at = excluded.used_at;

-- name: code_pages
-- The number of pages of complete code: digest.
SELECT pages FROM code WHERE digest = $1;

-- name: read_code_page
-- One page: digest, page.
SELECT data FROM code_pages WHERE digest = $1 AND page = $2;

-- name: trim_code
-- Delete code that nothing names and that was not used lately, and pages of uploads that were given up: named digests,
-- seconds. Returns the digests of the former.
WITH gone AS (
    DELETE FROM code
    WHERE digest <> ALL($1::text[]) AND used_at < clock_timestamp() - make_interval(secs => $2)
    RETURNING digest
), gone_pages AS (
    DELETE FROM code_pages AS page
    WHERE digest IN (SELECT digest FROM gone)
        OR (page.added_at < clock_timestamp() - make_interval(secs => $2)
            AND NOT EXISTS (SELECT FROM code WHERE code.digest = page.digest))
)
SELECT digest FROM gone;
