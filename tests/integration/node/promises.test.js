// amqplib's promise API: queues, exchanges, consumers, acknowledgements, headers.

const assert = require('node:assert/strict');
const { test } = require('node:test');
const { connect, fresh, inbox, next, openChannel, openConfirmChannel, transient } = require('./broker');

test('the server introduces itself', async (t) => {
  const { serverProperties } = (await connect(t)).connection;
  assert.equal(serverProperties.capabilities.publisher_confirms, true);
  assert.equal(serverProperties.capabilities['basic.nack'], true);
  assert.equal(serverProperties.capabilities.consumer_cancel_notify, true);
});

test('assertQueue reports counts, a queue in use is not deleted', async (t) => {
  const channel = await openConfirmChannel(t);
  const jobs = fresh('jobs');
  assert.deepEqual(await channel.assertQueue(jobs, transient), {
    queue: jobs,
    messageCount: 0,
    consumerCount: 0,
  });
  for (const body of ['one', 'two', 'three']) channel.sendToQueue(jobs, Buffer.from(body));
  await channel.waitForConfirms();
  assert.equal((await channel.checkQueue(jobs)).messageCount, 3);
  await channel.consume(jobs, () => {});
  assert.equal((await channel.checkQueue(jobs)).consumerCount, 1);
  await assert.rejects(channel.deleteQueue(jobs, { ifUnused: true }), /PRECONDITION_FAILED.*in use/);
});

test('the server names a queue, purges it and deletes it', async (t) => {
  const channel = await openConfirmChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  assert.match(queue, /^amq\.gen-/);
  for (const body of ['one', 'two', 'three']) channel.sendToQueue(queue, Buffer.from(body));
  await channel.waitForConfirms();
  assert.deepEqual(await channel.purgeQueue(queue), { messageCount: 3 });
  channel.sendToQueue(queue, Buffer.from('four'));
  await channel.waitForConfirms();
  assert.deepEqual(await channel.deleteQueue(queue), { messageCount: 1 });
});

test('properties and typed headers come back as sent', async (t) => {
  const channel = await openChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const headers = {
    text: 'žluťoučký',
    small: 7,
    big: 2 ** 40,
    negative: -5,
    real: 1.5,
    yes: true,
    nothing: null,
    bytes: Buffer.from([0, 255, 206]),
    list: [1, 'two', { three: 3 }],
    table: { deep: { deeper: 'x' } },
    when: { '!': 'timestamp', value: 1_700_000_000 },
  };
  channel.sendToQueue(queue, Buffer.from('{}'), {
    headers,
    contentType: 'application/json',
    contentEncoding: 'utf-8',
    correlationId: 'c-1',
    replyTo: 'replies',
    messageId: 'm-1',
    timestamp: 1_700_000_000,
    type: 'greeting',
    appId: 'tests',
    userId: 'guest',
    priority: 3,
    expiration: 60_000,
    persistent: true,
  });
  const message = await getSoon(channel, queue);
  assert.deepEqual(message.properties.headers, headers);
  assert.deepEqual(
    { ...message.properties, headers: undefined, clusterId: undefined },
    {
      headers: undefined,
      clusterId: undefined,
      contentType: 'application/json',
      contentEncoding: 'utf-8',
      deliveryMode: 2,
      priority: 3,
      correlationId: 'c-1',
      replyTo: 'replies',
      expiration: '60000',
      messageId: 'm-1',
      timestamp: 1_700_000_000,
      type: 'greeting',
      userId: 'guest',
      appId: 'tests',
    },
  );
});

test('a body of many frames arrives whole', async (t) => {
  const channel = await openChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const body = Buffer.from(Array.from({ length: 1_000_003 }, (_, at) => (at * 31) % 251));
  const messages = inbox();
  await channel.consume(queue, messages.push, { noAck: true });
  channel.sendToQueue(queue, body);
  channel.sendToQueue(queue, Buffer.alloc(0));
  assert.ok((await messages.take()).content.equals(body));
  assert.equal((await messages.take()).content.length, 0);
});

for (const { kind, bindings, key, headers, reached } of [
  { kind: 'direct', bindings: [['red'], ['blue']], key: 'red', reached: [1, 0] },
  { kind: 'fanout', bindings: [[''], ['x']], key: 'any', reached: [1, 1] },
  { kind: 'topic', bindings: [['log.#'], ['log.*'], ['#.error']], key: 'log.a.error', reached: [1, 0, 1] },
  {
    kind: 'headers',
    bindings: [['', { 'x-match': 'all', a: 1, b: 2 }], ['', { 'x-match': 'any', a: 1, b: 9 }], ['', { a: 2 }]],
    key: '',
    headers: { a: 1, b: 2 },
    reached: [1, 1, 0],
  },
]) {
  test(`a ${kind} exchange routes`, async (t) => {
    const channel = await openConfirmChannel(t);
    const { exchange } = await channel.assertExchange(fresh(kind), kind, { durable: false, autoDelete: true });
    const queues = [];
    for (const [pattern, args] of bindings) {
      const { queue } = await channel.assertQueue('', { exclusive: true });
      await channel.bindQueue(queue, exchange, pattern, args);
      queues.push(queue);
    }
    channel.publish(exchange, key, Buffer.from('hit'), { headers });
    await channel.waitForConfirms();
    const counts = [];
    for (const queue of queues) counts.push((await channel.checkQueue(queue)).messageCount);
    assert.deepEqual(counts, reached);
  });
}

test('exchanges bind to exchanges, and unbind', async (t) => {
  const channel = await openConfirmChannel(t);
  const { exchange: outer } = await channel.assertExchange(fresh('outer'), 'topic', { durable: false });
  const { exchange: inner } = await channel.assertExchange(fresh('inner'), 'fanout', { durable: false });
  const { queue } = await channel.assertQueue('', { exclusive: true });
  await channel.bindQueue(queue, inner, '');
  await channel.bindExchange(inner, outer, 'deep.#');
  channel.publish(outer, 'deep.down', Buffer.from('in'));
  channel.publish(outer, 'shallow', Buffer.from('out'));
  await channel.waitForConfirms();
  await channel.unbindExchange(inner, outer, 'deep.#');
  channel.publish(outer, 'deep.down', Buffer.from('late'));
  await channel.waitForConfirms();
  await channel.unbindQueue(queue, inner, '');
  assert.equal((await channel.deleteQueue(queue)).messageCount, 1);
  await channel.checkExchange(outer);
  await channel.deleteExchange(outer);
  await channel.deleteExchange(inner);
});

test('get returns one message, then false', async (t) => {
  const channel = await openChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  assert.equal(await channel.get(queue), false);
  channel.sendToQueue(queue, Buffer.from('only'));
  const message = await getSoon(channel, queue);
  assert.equal(message.content.toString(), 'only');
  assert.equal(message.fields.messageCount, 0);
  assert.equal(await channel.get(queue), false);
});

test('nack and reject requeue or drop', async (t) => {
  const channel = await openChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const messages = inbox();
  await channel.prefetch(1);
  await channel.consume(queue, messages.push);
  for (const body of ['a', 'b', 'c']) channel.sendToQueue(queue, Buffer.from(body));

  const first = await messages.take();
  channel.nack(first);
  const again = await messages.take();
  assert.deepEqual([again.content.toString(), again.fields.redelivered], ['a', true]);
  channel.nack(again, false, false);
  const second = await messages.take();
  assert.deepEqual([second.content.toString(), second.fields.redelivered], ['b', false]);
  channel.reject(second, true);
  const secondAgain = await messages.take();
  assert.deepEqual([secondAgain.content.toString(), secondAgain.fields.redelivered], ['b', true]);
  channel.ack(secondAgain);
  const third = await messages.take();
  assert.equal(third.content.toString(), 'c');
  channel.ack(third);
  await channel.close();
});

test('prefetch holds messages back until an ack of all before', async (t) => {
  const channel = await openConfirmChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  for (let number = 0; number < 6; number += 1) channel.sendToQueue(queue, Buffer.from(String(number)));
  await channel.waitForConfirms();
  await channel.prefetch(3);
  const messages = inbox();
  await channel.consume(queue, messages.push);
  await messages.take();
  await messages.take();
  const third = await messages.take();
  // A round trip later, a fourth message would have been here.
  assert.equal((await channel.checkQueue(queue)).messageCount, 3);
  assert.equal(messages.size, 0);
  channel.ack(third, true);
  for (const expected of ['3', '4', '5']) assert.equal((await messages.take()).content.toString(), expected);
  channel.ackAll();
});

test('recover redelivers what is not acknowledged', async (t) => {
  const channel = await openChannel(t);
  const { queue } = await channel.assertQueue('', { exclusive: true });
  const messages = inbox();
  await channel.consume(queue, messages.push);
  channel.sendToQueue(queue, Buffer.from('again'));
  assert.equal((await messages.take()).fields.redelivered, false);
  await channel.recover();
  assert.equal((await messages.take()).fields.redelivered, true);
});

test('cancel stops deliveries, and a deleted queue cancels with null', async (t) => {
  const channel = await openConfirmChannel(t);
  const jobs = fresh('jobs');
  await channel.assertQueue(jobs, transient);
  const messages = inbox();
  const { consumerTag } = await channel.consume(jobs, messages.push, { consumerTag: 'mine' });
  assert.equal(consumerTag, 'mine');
  await channel.cancel('mine');
  channel.sendToQueue(jobs, Buffer.from('kept'));
  await channel.waitForConfirms();
  assert.equal((await channel.checkQueue(jobs)).messageCount, 1);

  const other = inbox();
  await channel.consume(jobs, other.push, { noAck: true });
  assert.equal((await other.take()).content.toString(), 'kept');
  await channel.deleteQueue(jobs);
  assert.equal(await other.take(), null);
});

test('a request is answered over direct reply-to', async (t) => {
  const client = await openChannel(t);
  const server = await openChannel(t);
  const requests = fresh('requests');
  await server.assertQueue(requests, transient);
  await server.consume(requests, ({ content, properties }) => {
    server.sendToQueue(properties.replyTo, Buffer.from(`re: ${content}`), {
      correlationId: properties.correlationId,
    });
  }, { noAck: true });
  const replies = inbox();
  await client.consume('amq.rabbitmq.reply-to', replies.push, { noAck: true });
  client.sendToQueue(requests, Buffer.from('hello'), { replyTo: 'amq.rabbitmq.reply-to', correlationId: '7' });
  const reply = await replies.take();
  assert.deepEqual([reply.content.toString(), reply.properties.correlationId], ['re: hello', '7']);
});

test('an expired message is dead-lettered with its history', async (t) => {
  const channel = await openChannel(t);
  const graves = await channel.assertQueue('', { exclusive: true });
  const { queue } = await channel.assertQueue('', {
    exclusive: true,
    messageTtl: 20,
    deadLetterExchange: '',
    deadLetterRoutingKey: graves.queue,
    maxLength: 10,
  });
  const messages = inbox();
  await channel.consume(graves.queue, messages.push, { noAck: true });
  channel.sendToQueue(queue, Buffer.from('stale'));
  const [death] = (await messages.take()).properties.headers['x-death'];
  assert.deepEqual([death.reason, death.queue, death.count], ['expired', queue, 1]);
});

test('a closed channel gives its messages back', async (t) => {
  const connection = await connect(t);
  const [first, second] = [await connection.createChannel(), await connection.createChannel()];
  const { queue } = await first.assertQueue('', { exclusive: true });
  const [held, freed] = [inbox(), inbox()];
  await first.consume(queue, held.push);
  first.sendToQueue(queue, Buffer.from('mine'));
  await held.take();
  await second.consume(queue, freed.push);
  const closed = next(first, 'close');
  await first.close();
  await closed;
  const message = await freed.take();
  assert.deepEqual([message.content.toString(), message.fields.redelivered], ['mine', true]);
});

// basic.get until the message is there: a publish without confirm may still be on its way.
async function getSoon(channel, queue) {
  const end = Date.now() + 10_000;
  while (Date.now() < end) {
    const message = await channel.get(queue, { noAck: true });
    if (message) return message;
  }
  throw new Error(`nothing came to ${queue}`);
}
