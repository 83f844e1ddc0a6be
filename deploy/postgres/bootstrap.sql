-- The role and the database of Muster's controllers, made by the superuser; harmless when they are there already.
-- The role is no superuser and may not make roles or databases. Run by psql, in compose and by `muster up` alike:
-- the password comes from the file that MUSTER_PASSWORD_FILE names, so that it is on no command line.
\set ON_ERROR_STOP on
\set password `cat "$MUSTER_PASSWORD_FILE"`

-- Neither the server's log nor its statistics shall keep the password.
SET log_statement = 'none';
SET log_min_duration_statement = -1;
SET log_min_error_statement = 'panic';
SET password_encryption = 'scram-sha-256';

SELECT 'CREATE ROLE muster' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'muster')
\gexec
ALTER ROLE muster LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'password';

SELECT 'CREATE DATABASE muster OWNER muster' WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = 'muster')
\gexec
REVOKE ALL ON DATABASE muster FROM PUBLIC;
REVOKE CONNECT ON DATABASE postgres FROM PUBLIC;
REVOKE CONNECT ON DATABASE template1 FROM PUBLIC;
