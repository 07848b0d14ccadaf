"""The same questions asked of DuckDB, over the segments themselves: an independent calculation.

Nothing here is shared with the jobs but the names of columns; where there are two ways to compute
something, this is the other one. Windows and times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

_MESSAGE_EVENTS = """('publish', 'enqueue', 'confirm', 'return', 'drop', 'deliver', 'get', 'ack',
    'nack', 'reject', 'requeue', 'expire', 'dead_letter', 'purge', 'paged_out', 'paged_in')"""

_COLUMNS = """{ts: 'BIGINT', seq: 'BIGINT', boot: 'VARCHAR', ev: 'VARCHAR', vhost: 'VARCHAR',
    conn: 'BIGINT', ch: 'INT', "user": 'VARCHAR', exchange: 'VARCHAR', rk: 'VARCHAR',
    queue: 'VARCHAR', msg: 'BIGINT', ctag: 'VARCHAR', size: 'BIGINT', delivery_count: 'INT',
    persistent: 'BOOLEAN', routed: 'INT', n: 'BIGINT', wait_us: 'BIGINT', hold_us: 'BIGINT',
    depth: 'BIGINT', reason: 'VARCHAR', peer: 'VARCHAR', attrs: 'MAP(VARCHAR, VARCHAR)'}"""

_EVENTS = """
    CREATE VIEW e AS SELECT ts, seq, boot, ev, coalesce(vhost, '') vhost, coalesce(conn, 0) conn,
        coalesce(ch, 0) ch, coalesce("user", '') "user", coalesce(exchange, '') exchange,
        coalesce(rk, '') rk, coalesce(queue, '') queue, coalesce(msg, 0) msg,
        coalesce(ctag, '') ctag, coalesce(size, 0) size, coalesce(delivery_count, 0) delivery_count,
        coalesce(persistent, false) persistent, coalesce(routed, 0) routed, coalesce(n, 1) n,
        wait_us, hold_us, depth,
        coalesce(reason, '') reason, coalesce(peer, '') peer, attrs,
        ev = 'ack' OR (ev IN ('deliver', 'get') AND reason IS NOT DISTINCT FROM 'auto_ack') AS acks
    FROM lines
"""


class Oracle:
    """Events of a log in DuckDB, with windows of a given length."""

    def __init__(self, files: Sequence[Path], window_s: int) -> None:
        self._db = duckdb.connect()
        names = ", ".join(f"'{file}'" for file in files)
        self._db.execute(
            f"CREATE TABLE lines AS SELECT * FROM read_json([{names}], columns={_COLUMNS}, "
            f"format='newline_delimited')"
        )
        self._db.execute(_EVENTS)
        self._window = window_s * 1_000_000

    def ask(self, job: str) -> list[dict[str, Any]]:
        """The job's answer."""
        return self.query(QUESTIONS[job])

    def query(self, sql: str) -> list[dict[str, Any]]:
        cursor = self._db.execute(sql.replace("$WINDOW", str(self._window)))
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


_MOVES = """
    SELECT ts, seq, boot, vhost, queue, n, if(ev = 'queue_delete', 0, depth) AS depth,
        CASE WHEN ev IN ('publish', 'enqueue', 'requeue') THEN 1
            WHEN ev IN ('queue_delete', 'queue_declare') THEN 0 ELSE -1 END AS way
    FROM e WHERE queue != '' AND (
        ev IN ('publish', 'enqueue', 'requeue', 'deliver', 'get', 'expire', 'purge', 'queue_delete')
        OR (ev = 'drop' AND ctag = '')
        OR (ev = 'dead_letter' AND reason IN ('maxlen', 'delivery_limit'))
        OR (ev = 'queue_declare' AND reason = 'recovered'))
"""
# A zero for each queue that a start did not bring back, as an event of that moment.
_FORGOTTEN = f"""
    SELECT DISTINCT s.ts, s.seq, s.boot, m.vhost, m.queue, 0 AS n, 0 AS depth, 0 AS way
    FROM e s JOIN ({_MOVES}) m ON m.ts < s.ts
    WHERE s.ev = 'broker_start' AND NOT EXISTS (FROM e r WHERE r.boot = s.boot
        AND r.ev = 'queue_declare' AND r.reason = 'recovered' AND r.vhost = m.vhost
        AND r.queue = m.queue)
        -- Once: nothing is forgotten twice.
        AND s.ts = (SELECT min(o.ts) FROM e o WHERE o.ev = 'broker_start' AND o.ts > m.ts)
"""
# The depth event by event: what came and went so far, put right at every stamp.
_FLOWS = f"""
    SELECT "window", vhost, queue, coalesce(sum(n) FILTER (way > 0), 0)::BIGINT AS came,
        coalesce(sum(n) FILTER (way < 0), 0)::BIGINT AS went,
        greatest(0, arg_max(ready, (ts, seq)))::BIGINT AS depth
    FROM (SELECT *, net + coalesce(last_value(depth - net IGNORE NULLS) OVER v, 0) AS ready
        FROM (SELECT *, ts - ts % $WINDOW AS "window", sum(way * n) OVER w AS net
            FROM ({_MOVES} UNION ALL {_FORGOTTEN})
            WINDOW w AS (PARTITION BY vhost, queue ORDER BY ts, seq))
        WINDOW v AS (PARTITION BY vhost, queue ORDER BY ts, seq))
    GROUP BY ALL
"""
# The depth at every window from a queue's first to the log's last.
_DEPTHS = f"""
    WITH f AS ({_FLOWS}), every AS (SELECT unnest(range((SELECT min("window") FROM f),
        (SELECT max(ts - ts % $WINDOW) + 1 FROM e), $WINDOW)) AS "window")
    SELECT every."window", vhost, queue, f.depth
    FROM (SELECT DISTINCT vhost, queue FROM f) CROSS JOIN every
        ASOF JOIN f USING (vhost, queue, "window")
"""

_WAITS = """
    SELECT ts - ts % $WINDOW AS "window", vhost, queue, count(*) AS n,
        quantile_disc(wait_us, 0.5) / 1000.0 AS wait_p50_ms,
        quantile_disc(wait_us, 0.95) / 1000.0 AS wait_p95_ms,
        quantile_disc(wait_us, 0.99) / 1000.0 AS wait_p99_ms,
        max(wait_us) / 1000.0 AS wait_max_ms
    FROM e WHERE ev IN ('deliver', 'get') AND delivery_count = 0 GROUP BY ALL
"""

_E2E = """
    SELECT a.ts - a.ts % $WINDOW AS "window", vhost, queue, count(*) AS done,
        quantile_disc(a.ts - p.ts, 0.5) / 1000.0 AS e2e_p50_ms,
        quantile_disc(a.ts - p.ts, 0.95) / 1000.0 AS e2e_p95_ms,
        quantile_disc(a.ts - p.ts, 0.99) / 1000.0 AS e2e_p99_ms
    FROM e a JOIN e p USING (vhost, queue, msg)
    WHERE a.acks AND p.ev IN ('publish', 'enqueue') AND msg != 0 GROUP BY ALL
"""

QUESTIONS = {
    "throughput": f"""
        SELECT ts - ts % $WINDOW AS "window", vhost, ev, sum(n)::BIGINT AS n,
            sum(size)::BIGINT AS bytes, sum(n) * 1e6 / $WINDOW AS per_s
        FROM e WHERE ev IN {_MESSAGE_EVENTS} GROUP BY ALL""",
    "queue_latency": f"""
        SELECT "window", vhost, queue, coalesce(n, 0) AS n, wait_p50_ms, wait_p95_ms, wait_p99_ms,
            wait_max_ms, coalesce(done, 0) AS done, e2e_p50_ms, e2e_p95_ms, e2e_p99_ms
        FROM ({_WAITS}) FULL JOIN ({_E2E}) USING ("window", vhost, queue)""",
    "backlog": f"""
        SELECT "window", vhost, queue, came, went, depth,
            (depth - lag(depth) OVER w) * 1e6 / ("window" - lag("window") OVER w) AS slope
        FROM ({_FLOWS}) WINDOW w AS (PARTITION BY vhost, queue ORDER BY "window")""",
    "slow_consumers": """
        WITH c AS (
            SELECT vhost, queue, ctag, boot, conn, ch, "user",
                count(*) FILTER (ev = 'deliver') AS deliveries,
                count(*) FILTER (ev = 'deliver' AND NOT acks) AS to_answer,
                count(*) FILTER (ev IN ('requeue', 'drop')) AS taken,
                count(*) FILTER (is_answer) AS answers,
                quantile_disc(hold_us, 0.5) FILTER (is_answer) AS p50,
                quantile_disc(hold_us, 0.95) FILTER (is_answer) AS p95,
                quantile_disc(hold_us, 0.99) FILTER (is_answer) AS p99,
                max(hold_us) FILTER (is_answer) AS most,
                sum(hold_us) FILTER (is_answer) AS held
            FROM (SELECT *, ev IN ('ack', 'nack', 'reject') AS is_answer FROM e)
            WHERE ctag != '' AND ev IN ('deliver', 'ack', 'nack', 'reject', 'requeue', 'drop')
                AND NOT (ev = 'requeue' AND reason IN ('nack', 'reject'))
            GROUP BY ALL)
        SELECT vhost, queue, ctag, boot, conn, ch, "user", deliveries, answers,
            to_answer - answers - taken AS unacked,
            p50 / 1e3 AS hold_p50_ms, p95 / 1e3 AS hold_p95_ms,
            p99 / 1e3 AS hold_p99_ms, most / 1e3 AS hold_max_ms,
            held / sum(held) OVER (PARTITION BY vhost, queue) AS hold_share,
            p50 / (SELECT quantile_disc(o.p50, 0.5) FROM c o
                WHERE o.vhost = c.vhost AND o.queue = c.queue AND o.ctag != c.ctag) AS times_others
        FROM c""",
    # The mean difference between any two consumers: what Gini means.
    "fairness": """
        WITH c AS (SELECT vhost, queue, boot, conn, ctag, count(*) FILTER (ev = 'deliver') AS got,
            max(coalesce(attrs['x-priority'], '0')) FILTER (ev = 'consume') AS priority
            FROM e WHERE ev IN ('consume', 'deliver') GROUP BY ALL),
        b AS (SELECT vhost, queue, boot, sum(got) AS had, count(DISTINCT priority) AS priorities
            FROM c GROUP BY ALL),
        even AS (SELECT vhost, queue, boot FROM b WHERE priorities < 2
            AND NOT EXISTS (FROM b o WHERE o.vhost = b.vhost AND o.queue = b.queue
                AND (o.had, o.boot) > (b.had, b.boot))
            AND NOT EXISTS (FROM e d WHERE d.ev = 'queue_declare' AND d.vhost = b.vhost
                AND d.queue = b.queue AND d.attrs['x-single-active-consumer'] = 'true')),
        l AS (FROM c JOIN even USING (vhost, queue, boot)),
        g AS (SELECT m.vhost, m.queue, sum(abs(m.got - o.got)) AS differences
            FROM l m JOIN l o USING (vhost, queue) GROUP BY ALL)
        SELECT vhost, queue, count(*) AS consumers, sum(got)::BIGINT AS deliveries,
            any_value(differences) / (2.0 * count(*) * sum(got)) AS gini,
            max(got) / sum(got) AS max_share
        FROM l JOIN g USING (vhost, queue) GROUP BY vhost, queue""",
    "poison": """
        SELECT vhost, queue, msg, count(*) FILTER (ev = 'deliver') AS deliveries,
            count(DISTINCT ctag) FILTER (ev = 'deliver') AS consumers,
            min(ts) FILTER (ev NOT IN ('publish', 'enqueue')) AS first_at,
            max(ts) FILTER (ev NOT IN ('publish', 'enqueue')) AS last_at,
            count(*) FILTER (ev = 'ack') > 0 AS acked
        FROM e WHERE msg != 0 AND queue != '' GROUP BY ALL
        HAVING count(*) FILTER (ev = 'deliver') >= 5 OR bool_or(reason = 'delivery_limit')""",
    "dead_letters": """
        SELECT vhost, queue, exchange, rk, reason, count(*) AS n, sum(size)::BIGINT AS bytes,
            count(*) FILTER (routed = 0) AS lost, min(ts) AS first_at, max(ts) AS last_at
        FROM e WHERE ev = 'dead_letter' GROUP BY ALL""",
    # From the publishes that reached nothing, not from what was said of them.
    "unroutable": """
        SELECT p.vhost, p.exchange, p.rk, p."user", count(*) AS n,
            count(*) FILTER (o.ev = 'return') AS returned,
            count(*) FILTER (o.ev = 'drop') AS dropped, sum(p.size)::BIGINT AS bytes,
            min(o.ts) AS first_at, max(o.ts) AS last_at
        FROM e p JOIN e o ON o.msg = p.msg AND o.ev IN ('return', 'drop')
        WHERE p.ev = 'publish' AND p.routed = 0 GROUP BY ALL""",
    "hot_keys": """
        SELECT vhost, exchange, rk, count(*) AS n, sum(size)::BIGINT AS bytes,
            count(*) / sum(count(*)) OVER (PARTITION BY vhost, exchange) AS share,
            rank() OVER (PARTITION BY vhost, exchange ORDER BY count(*) DESC, rk) AS rank
        FROM e WHERE ev = 'publish' GROUP BY vhost, exchange, rk""",
    "churn": """
        SELECT "user", split_part(peer, ':', 1) AS host,
            count(*) FILTER (ev = 'connection_open') AS opens,
            count(*) FILTER (ev = 'connection_close') AS closes,
            count(*) FILTER (ev = 'connection_close' AND hold_us < 5000000) AS short,
            quantile_disc(hold_us, 0.5) FILTER (ev = 'connection_close') / 1e6 AS median_life_s,
            count(*) FILTER (ev = 'channel_open') AS channels,
            count(*) FILTER (ev = 'auth_fail') AS refused
        FROM e WHERE peer != '' GROUP BY ALL""",
    "usage": """
        SELECT vhost, "user", count(*) FILTER (ev = 'publish') AS msgs_in,
            coalesce(sum(size) FILTER (ev = 'publish'), 0)::BIGINT AS bytes_in,
            count(*) FILTER (ev = 'deliver') AS msgs_out,
            coalesce(sum(size) FILTER (ev = 'deliver'), 0)::BIGINT AS bytes_out,
            count(*) FILTER (ev = 'connection_open') AS connections,
            coalesce(sum(size) FILTER (ev IN ('publish', 'deliver')), 0)
                / (SELECT sum(size) FROM e WHERE ev IN ('publish', 'deliver')) AS share
        FROM e WHERE "user" != '' AND ev IN ('publish', 'deliver', 'connection_open')
        GROUP BY ALL""",
    "unused": r"""
        WITH types AS (SELECT vhost, exchange, any_value(attrs['type']) AS type FROM e
            WHERE ev = 'exchange_declare' GROUP BY ALL),
        -- A key, and one of the queues that took a message with it.
        keys AS (SELECT vhost, exchange, rk AS key, if(ev = 'dead_letter', '', queue) AS taker,
            max(ts) AS ts FROM e WHERE ev IN ('publish', 'enqueue', 'dead_letter') GROUP BY ALL),
        pairs AS (SELECT b.vhost, b.exchange, b.queue, b.rk, b.ts AS declared_at, k.ts AS used,
            k.key, k.taker = b.queue AS took, k.key IS NOT NULL AND CASE coalesce(type, '')
                WHEN 'topic' THEN regexp_full_match(k.key,
                    replace(replace(replace(b.rk, '.', '\.'), '*', '[^.]*'), '#', '.*'))
                WHEN 'direct' THEN k.key = b.rk ELSE true END AS fits
            FROM e b LEFT JOIN types USING (vhost, exchange)
                LEFT JOIN keys k ON k.vhost = b.vhost AND k.exchange = b.exchange
            WHERE b.ev = 'bind'),
        ways AS (SELECT *, fits OR (took AND NOT bool_or(fits)
            OVER (PARTITION BY vhost, exchange, queue, key)) AS was_way FROM pairs)
        SELECT vhost, 'queue' AS kind, queue AS name, min(ts) FILTER (ev = 'queue_declare')
                AS declared_at,
            max(ts) FILTER (ev IN ('publish', 'enqueue', 'deliver', 'consume')) AS last_used
        FROM e WHERE queue != '' GROUP BY ALL
        HAVING count(*) FILTER (ev = 'queue_declare') > 0
        UNION ALL
        SELECT vhost, 'exchange', exchange, min(ts) FILTER (ev = 'exchange_declare'),
            max(ts) FILTER (ev IN ('publish', 'enqueue', 'dead_letter'))
        FROM e GROUP BY ALL HAVING count(*) FILTER (ev = 'exchange_declare') > 0
        UNION ALL
        SELECT vhost, 'binding', exchange || ' -> ' || queue || ' (' || rk || ')', declared_at,
            max(used) FILTER (was_way)
        FROM ways GROUP BY ALL""",
    "quality": """
        SELECT boot, count(*) AS events, min(ts) AS first_at, max(ts) AS last_at,
            max(seq) - min(seq) + 1 - count(DISTINCT seq) AS missing,
            count(*) - count(DISTINCT seq) AS duplicates,
            coalesce(sum(n) FILTER (ev = 'log_gap'), 0)::BIGINT AS shed
        FROM e GROUP BY ALL""",
    "forecast": f"""
        WITH d AS (SELECT *, "window" / 1e6 AS x FROM ({_DEPTHS})),
        h AS (SELECT (min(x) + max(x)) / 2 AS half FROM d),
        r AS (SELECT vhost, queue, count(*) AS windows, arg_max(depth, x) AS depth,
            regr_slope(depth, x - half) AS slope, regr_sxx(depth, x - half) AS sxx,
            regr_r2(depth, x - half) AS r2
            FROM d, h WHERE x >= half GROUP BY ALL),
        -- The error of a slope from its coefficient of determination.
        s AS (SELECT *, 1.96 * abs(slope) * sqrt((1 / r2 - 1) / (windows - 2)) AS error
            FROM r WHERE windows >= 5 AND slope != 0)
        SELECT vhost, queue, windows, depth, slope, slope - error AS slope_low,
            slope + error AS slope_high, (1000000 - depth) / slope AS eta_s,
            (1000000 - depth) / (slope + error) AS eta_low_s,
            (1000000 - depth) / (slope - error) AS eta_high_s
        FROM s WHERE slope - error > 0""",
    # What nothing more is told of: taken by the first purge or deletion of its queue, or by the
    # first start that did not bring it back.
    "lifecycle": """
        WITH lives AS (SELECT vhost, queue, msg, max(size) AS size, count(*) FILTER (ev = 'deliver')
                AS deliveries, min(ts) FILTER (ev IN ('publish', 'enqueue')) AS published_at,
                min(ts) FILTER (ev = 'deliver') AS delivered_at,
                -- Of what nothing is known it is believed.
                coalesce(max(persistent) FILTER (ev IN ('publish', 'enqueue')), true) AS persistent,
                max(ts) FILTER (acks) AS acked,
                max(ts) FILTER (ev = 'dead_letter') AS died,
                max(ts) FILTER (ev = 'return') AS returned, max(ts) FILTER (ev = 'drop') AS dropped,
                max(ts) AS last, arg_max(ev, (ts, seq)) = 'deliver' AS is_held
            FROM e WHERE msg != 0 AND NOT (ev = 'publish' AND routed > 1) GROUP BY ALL),
        starts AS (SELECT l.vhost, l.queue, l.msg, min(s.ts) AS start, arg_min(s.boot, s.ts) AS boot
            FROM lives l JOIN e s ON s.ev = 'broker_start' AND s.ts > l.last GROUP BY ALL),
        restarted AS (SELECT l.*, start, persistent AND EXISTS (FROM e r WHERE r.boot = s.boot
                AND r.ev = 'queue_declare' AND r.reason = 'recovered' AND r.queue = l.queue
                AND r.vhost = l.vhost) AS stays
            FROM lives l LEFT JOIN starts s USING (vhost, queue, msg)),
        ends AS (SELECT *, if(stays, NULL, start) AS lost,
            (SELECT min(ts) FROM e WHERE ev = 'purge' AND e.vhost = r.vhost AND e.queue = r.queue
                AND ts > if(is_held, if(stays, start, NULL), last)) AS purged,
            (SELECT min(ts) FROM e WHERE ev = 'queue_delete' AND e.vhost = r.vhost
                AND e.queue = r.queue AND ts > last) AS deleted
            FROM restarted r)
        SELECT vhost, queue, msg, size, deliveries, published_at, delivered_at,
            coalesce(acked, died, returned, dropped, least(lost, purged, deleted)) AS done_at,
            acked - published_at AS e2e_us,
            CASE WHEN acked IS NOT NULL THEN 'acked' WHEN died IS NOT NULL THEN 'dead_lettered'
                WHEN returned IS NOT NULL THEN 'returned' WHEN dropped IS NOT NULL THEN 'dropped'
                WHEN least(lost, purged, deleted) = lost THEN 'lost'
                WHEN least(lost, purged, deleted) = purged THEN 'purged'
                WHEN least(lost, purged, deleted) = deleted THEN 'dropped'
                WHEN is_held AND NOT coalesce(stays, false) THEN 'unacked'
                ELSE 'ready' END AS outcome
        FROM ends""",
    # Up the chain, by recursion: of those that held up whom one waits for, who did so longest.
    "throttling": """
        WITH RECURSIVE b AS (
            SELECT boot, attrs['who'] AS who, attrs['by'] AS of, ts - coalesce(hold_us, 0) AS a,
                ts AS z, n FROM e WHERE ev = 'credit_unblocked'
            UNION ALL
            SELECT boot, attrs['who'], attrs['by'], ts,
                (SELECT max(ts) FROM e o WHERE o.boot = e.boot), 1
            FROM e WHERE ev = 'credit_blocked' AND NOT EXISTS (FROM e u
                WHERE u.ev = 'credit_unblocked' AND u.boot = e.boot AND u.ts >= e.ts
                AND u.attrs['who'] = e.attrs['who'] AND u.attrs['by'] = e.attrs['by'])),
        up AS (
            SELECT row_number() OVER () AS id, *, of AS root, who || ' <- ' || of AS path, 0 AS step
            FROM b
            UNION ALL
            SELECT * EXCLUDE rank FROM (
                SELECT up.id, up.boot, up.who, up.of, up.a, up.z, up.n, c.of AS root,
                    up.path || ' <- ' || c.of AS path, step + 1 AS step,
                    row_number() OVER (PARTITION BY up.id, step
                        ORDER BY least(c.z, up.z) - greatest(c.a, up.a) DESC, c.of DESC) AS rank
                FROM up JOIN b c ON c.boot = up.boot AND c.who = up.root AND c.a < up.z
                    AND c.z > up.a
                WHERE step < 3)
            WHERE rank = 1)
        SELECT who, of AS waited_for, root, path, sum(n)::BIGINT AS times,
            sum(z - a) / 1e6 AS blocked_s, max(z - a) / 1e6 AS longest_s
        FROM (SELECT * FROM up QUALIFY row_number() OVER (PARTITION BY id ORDER BY step DESC) = 1)
        GROUP BY ALL""",
    "anomalies": f"""
        WITH f AS ({_FLOWS}), span AS (SELECT min("window") AS a, max("window") AS b FROM f),
        every AS (SELECT unnest(range(a + $WINDOW, b, $WINDOW)) AS "window" FROM span),
        m AS (
            SELECT "window", vhost, queue, 'messages in per second' AS metric,
                coalesce(came, 0) * 1e6 / $WINDOW AS value, 1e6 / $WINDOW AS floor
            FROM every CROSS JOIN (SELECT DISTINCT vhost, queue FROM f)
                LEFT JOIN f USING ("window", vhost, queue)
            UNION ALL
            SELECT "window", vhost, queue, 'p99 wait in ms', wait_p99_ms, 10 FROM ({_WAITS})),
        s AS (SELECT vhost, queue, metric, count(*) AS windows, median(value) AS median,
            mad(value) AS mad FROM m GROUP BY ALL)
        SELECT "window", vhost, queue, metric, value, median,
            (value - median) / (1.4826 * greatest(mad, 0.1 * abs(median), floor)) AS score
        FROM m JOIN s USING (vhost, queue, metric)
        WHERE windows >= 10
            AND abs(value - median) / (1.4826 * greatest(mad, 0.1 * abs(median), floor)) >= 8""",
}
