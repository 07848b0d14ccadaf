// What amqplib sees when the broker refuses: channel errors, connection errors, closing.

const assert = require('node:assert/strict');
const { test } = require('node:test');
const amqplib = require('amqplib');
const { connect, fresh, next, openChannel, transient, url } = require('./broker');

for (const { name, code, text, provoke } of [
  {
    name: 'a missing queue',
    code: 404,
    text: /NOT_FOUND - no queue/,
    provoke: (channel) => channel.checkQueue(fresh('missing')),
  },
  {
    name: 'a missing exchange',
    code: 404,
    text: /NOT_FOUND - no exchange/,
    provoke: (channel) => channel.checkExchange(fresh('missing')),
  },
  {
    name: 'a queue declared otherwise',
    code: 406,
    text: /PRECONDITION_FAILED - inequivalent arg 'durable'/,
    provoke: async (channel) => {
      const jobs = fresh('jobs');
      await channel.assertQueue(jobs, transient);
      await channel.assertQueue(jobs, { ...transient, durable: true });
    },
  },
  {
    name: 'a reserved name',
    code: 403,
    text: /ACCESS_REFUSED/,
    provoke: (channel) => channel.assertExchange(`amq.${fresh('mine')}`, 'direct'),
  },
  {
    name: 'a get from a missing queue',
    code: 404,
    text: /NOT_FOUND - no queue/,
    provoke: (channel) => channel.get(fresh('missing')),
  },
]) {
  test(`${name} closes the channel with ${code}, not the connection`, async (t) => {
    const connection = await connect(t);
    const channel = await connection.createChannel();
    const emitted = next(channel, 'error');
    const closed = next(channel, 'close');
    await assert.rejects(provoke(channel), text);
    assert.equal((await emitted).code, code);
    await closed;
    const fine = await connection.createChannel();
    await fine.assertQueue('', { exclusive: true });
  });
}

test('an unknown delivery tag closes the channel with 406', async (t) => {
  const channel = await openChannel(t);
  const emitted = next(channel, 'error');
  channel.ack({ fields: { deliveryTag: 99 } });
  const error = await emitted;
  assert.equal(error.code, 406);
  assert.match(error.message, /unknown delivery tag 99/);
});

test("another connection's exclusive queue is locked", async (t) => {
  const owner = await openChannel(t);
  const { queue } = await owner.assertQueue('', { exclusive: true });
  const stranger = await openChannel(t);
  await assert.rejects(stranger.consume(queue, () => {}), /RESOURCE_LOCKED/);
});

test('an unknown exchange type closes the connection with 503', async (t) => {
  const connection = await connect(t);
  const channel = await connection.createChannel();
  channel.on('error', () => {});
  const emitted = next(connection, 'error');
  const closed = next(connection, 'close');
  await assert.rejects(channel.assertExchange(fresh('odd'), 'x-no-such-kind'));
  assert.equal((await emitted).code, 503);
  await closed;
});

test('closing a connection ends its channels and its exclusive queues', async (t) => {
  const connection = await connect(t);
  const channel = await connection.createChannel();
  const name = fresh('mine');
  await channel.assertQueue(name, { exclusive: true });
  const closed = next(connection, 'close');
  await connection.close();
  await closed;
  assert.throws(() => channel.sendToQueue(name, Buffer.from('late')), /closed/i);
  const other = await openChannel(t);
  await assert.rejects(other.checkQueue(name), /NOT_FOUND/);
});

test('a wrong password is refused', async () => {
  const address = new URL(url);
  address.password = 'wrong';
  await assert.rejects(amqplib.connect(address.href), /ACCESS_REFUSED/);
});

test('a missing vhost is refused', async () => {
  const address = new URL(url);
  address.pathname = `/${fresh('vhost')}`;
  await assert.rejects(amqplib.connect(address.href), /ConnectionClose/);
});

test('many channels live on one connection', async (t) => {
  const connection = await connect(t);
  const channels = await Promise.all(Array.from({ length: 100 }, () => connection.createChannel()));
  const names = await Promise.all(channels.map((channel) => channel.assertQueue('', { exclusive: true })));
  assert.equal(new Set(names.map(({ queue }) => queue)).size, 100);
  await Promise.all(channels.map((channel) => channel.close()));
});
