// amqplib's confirm channels: acks, nacks, returned messages, backpressure.

const assert = require('node:assert/strict');
const { promisify } = require('node:util');
const { test } = require('node:test');
const { connect, fresh, next, openConfirmChannel, transient } = require('./broker');

test('every publish has its callback called', async (t) => {
  const channel = await openConfirmChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const confirmed = [];
  for (let number = 0; number < 500; number += 1) {
    channel.sendToQueue(queue, Buffer.from(String(number)), {}, (error) => {
      confirmed.push(error ?? number);
    });
  }
  await channel.waitForConfirms();
  assert.deepEqual(confirmed, [...Array(500).keys()]);
  assert.equal((await channel.checkQueue(queue)).messageCount, 500);
});

test('a persistent message to a durable queue is confirmed', async (t) => {
  const channel = await openConfirmChannel(t);
  const jobs = fresh('jobs');
  await channel.assertQueue(jobs, { durable: true, expires: transient.expires });
  await promisify(channel.sendToQueue.bind(channel))(jobs, Buffer.from('safe'), { persistent: true });
  assert.equal((await channel.deleteQueue(jobs)).messageCount, 1);
});

test('an unroutable mandatory message is returned, then confirmed', async (t) => {
  const channel = await openConfirmChannel(t);
  const missing = fresh('missing');
  const order = [];
  channel.on('return', ({ fields, content }) => {
    order.push(['return', fields.replyCode, fields.replyText, fields.exchange, fields.routingKey, content.toString()]);
  });
  channel.publish('', missing, Buffer.from('lost'), { mandatory: true }, (error) => order.push(['confirm', error]));
  await channel.waitForConfirms();
  assert.deepEqual(order, [
    ['return', 312, 'NO_ROUTE', '', missing, 'lost'],
    ['confirm', null],
  ]);
});

test('an unroutable message that is not mandatory is confirmed and gone', async (t) => {
  const channel = await openConfirmChannel(t);
  channel.on('return', () => assert.fail('nobody asked for it back'));
  await promisify(channel.publish.bind(channel))('', fresh('missing'), Buffer.from('lost'), {});
});

test('a full queue that rejects nacks the publisher', async (t) => {
  const channel = await openConfirmChannel(t);
  const { queue } = await channel.assertQueue('', {
    exclusive: true,
    maxLength: 1,
    arguments: { 'x-overflow': 'reject-publish' },
  });
  const send = promisify(channel.sendToQueue.bind(channel));
  await send(queue, Buffer.from('fits'), {});
  await assert.rejects(send(queue, Buffer.from('too many'), {}), /nacked/);
  assert.equal((await channel.checkQueue(queue)).messageCount, 1);
});

test('a full write buffer drains', async (t) => {
  const channel = await openConfirmChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  let sent = 1;
  while (channel.sendToQueue(queue, Buffer.alloc(64 * 1024))) sent += 1;
  await next(channel, 'drain');
  await channel.waitForConfirms();
  assert.equal((await channel.checkQueue(queue)).messageCount, sent);
});

test('publishing to a missing exchange closes the channel under its confirms', async (t) => {
  const connection = await connect(t);
  const channel = await connection.createConfirmChannel();
  const failed = next(channel, 'error');
  const publish = promisify(channel.publish.bind(channel));
  const refused = assert.rejects(publish(fresh('missing'), 'key', Buffer.from('lost'), {}), /channel closed/);
  assert.equal((await failed).code, 404);
  await refused;
  // The connection is none the worse for it.
  await (await connection.createConfirmChannel()).close();
});
