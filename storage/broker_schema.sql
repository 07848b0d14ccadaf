-- broker.db: what belongs to the broker as a whole and to no virtual host. Version 1.
-- Opened as the files of virtual hosts are, always with synchronous=FULL.
-- Names that are not UTF-8 stand as blobs.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,             -- 'schema_version'; 'defaults_made' once the first start has
    value NOT NULL                      -- made the default user and virtual host
) WITHOUT ROWID;

CREATE TABLE vhost (
    name        PRIMARY KEY,
    is_deleting INTEGER NOT NULL        -- 1 while its files are being deleted: a start goes on with it
) WITHOUT ROWID;

CREATE TABLE user (
    name          PRIMARY KEY,
    password_hash BLOB NOT NULL,        -- 4 bytes of salt, SHA-256 of salt and password
    tags          TEXT NOT NULL         -- JSON array
) WITHOUT ROWID;

CREATE TABLE parameter (                -- runtime parameters that hold in no particular virtual host
    component TEXT NOT NULL,
    name      NOT NULL,
    value     TEXT NOT NULL,            -- JSON
    PRIMARY KEY (component, name)
) WITHOUT ROWID;
