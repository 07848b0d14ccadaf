-- Everything of one virtual host. Version 2; migrations.py leads older files here.
-- Opened with: WAL, synchronous=FULL, auto_vacuum=INCREMENTAL, page_size as database.py has it.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,             -- 'schema_version', 'vhost', 'clean' (1 after a clean stop)
    value NOT NULL
) WITHOUT ROWID;

CREATE TABLE exchange (
    name        TEXT PRIMARY KEY,
    type        TEXT NOT NULL,
    auto_delete INTEGER NOT NULL,
    internal    INTEGER NOT NULL,
    arguments   BLOB NOT NULL           -- AMQP field table, as declared
) WITHOUT ROWID;

CREATE TABLE queue (
    id          INTEGER PRIMARY KEY,    -- upper part of message.key; reused once its rows are gone
    name        TEXT NOT NULL UNIQUE,
    auto_delete INTEGER NOT NULL,
    arguments   BLOB NOT NULL,
    declared_by TEXT NOT NULL DEFAULT ''    -- user whose limit it counts against; '' if not known
);

-- The messages of a queue with priorities: those of priority 0 are under its own id, those of
-- another, once it was used, under one more. A row goes with that of its queue.
CREATE TABLE sub_queue (
    id       INTEGER PRIMARY KEY,       -- as queue.id
    queue_id INTEGER NOT NULL,
    priority INTEGER NOT NULL
);

CREATE TABLE binding (
    source      TEXT NOT NULL,          -- exchange
    kind        TEXT NOT NULL,          -- of the destination: 'queue' or 'exchange'
    destination TEXT NOT NULL,
    key         TEXT NOT NULL,
    arguments   BLOB NOT NULL,
    PRIMARY KEY (source, kind, destination, key, arguments)
) WITHOUT ROWID;

-- What is set at run time: policies, operator policies, limits.
CREATE TABLE parameter (
    component TEXT NOT NULL,            -- 'policy', 'operator_policy', 'vhost-limits'
    name      TEXT NOT NULL,
    value     TEXT NOT NULL,            -- JSON
    PRIMARY KEY (component, name)
) WITHOUT ROWID;

-- One row per queue or sub-queue, written in each commit the queue took part in: a start reads only these.
CREATE TABLE counter (
    queue_id  INTEGER PRIMARY KEY,
    next_seq  INTEGER NOT NULL,         -- no message of the queue has this position or a later one
    messages  INTEGER NOT NULL,         -- rows in message
    bytes     INTEGER NOT NULL,         -- sum of their body sizes
    delivered INTEGER NOT NULL,         -- highest position ever delivered, -1 if none
    expiring  INTEGER NOT NULL DEFAULT 0    -- 1: some of its messages may have an expiry;
                                            -- 2: they are marked (message.flags 512)
);

-- The queue index: positions of all queues, with small bodies embedded.
CREATE TABLE message (
    key        INTEGER PRIMARY KEY,     -- queue id << 40 | position
    size       INTEGER NOT NULL,        -- of the body
    flags      INTEGER NOT NULL,        -- what the message needs (protocol/message.py); 256: persistent;
                                        -- 512: leaves when it expires, wherever it stands
    expires_at INTEGER,                 -- wall clock, milliseconds
    envelope   BLOB NOT NULL,           -- exchange and routing key as two short strings
    extra_keys BLOB,                    -- further routing keys (CC, BCC) as short strings
    header     BLOB NOT NULL,           -- property flags and properties
    body_id    INTEGER,                 -- in the table body; NULL where the body is embedded
    body       BLOB,
    delivery_count INTEGER NOT NULL DEFAULT 0,  -- how often it came back from a consumer
    log_id     INTEGER,                 -- its number in the event log, if it is told there
    stamp_us   INTEGER                  -- when it came into the queue, unless log_id tells
);

-- Only rows of queues that let go of messages the moment they expire: others cost nothing.
CREATE INDEX message_expiry ON message (key >> 40, expires_at)
    WHERE expires_at IS NOT NULL AND flags & 512;

-- The message store: large bodies, once each, however many queues hold the message.
CREATE TABLE body (
    id   INTEGER PRIMARY KEY,
    refs INTEGER NOT NULL,              -- rows in message that name it
    body BLOB NOT NULL
);
