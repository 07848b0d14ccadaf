// amqplib's callback API: the same protocol, driven the old way.

const assert = require('node:assert/strict');
const { test } = require('node:test');
const amqplib = require('amqplib/callback_api');
const { fresh, url } = require('./broker');

test('publish, consume and acknowledge', (t, done) => {
  amqplib.connect(url, (refused, connection) => {
    if (refused) return done(refused);
    connection.createChannel((error, channel) => {
      if (error) return done(error);
      channel.assertQueue('', { exclusive: true }, (undeclared, { queue }) => {
        if (undeclared) return done(undeclared);
        channel.prefetch(1);
        channel.consume(queue, (message) => {
          channel.ack(message);
          if (message.content.toString() !== 'last') return;
          connection.close(done);
        });
        channel.sendToQueue(queue, Buffer.from('first'));
        channel.sendToQueue(queue, Buffer.from('last'));
      });
    });
  });
});

test('exchange, binding, confirm and get', (t, done) => {
  amqplib.connect(url, (refused, connection) => {
    if (refused) return done(refused);
    connection.createConfirmChannel((error, channel) => {
      if (error) return done(error);
      const exchange = fresh('topics');
      channel.assertExchange(exchange, 'topic', { durable: false, autoDelete: true });
      channel.assertQueue('', { exclusive: true }, (undeclared, { queue }) => {
        if (undeclared) return done(undeclared);
        channel.bindQueue(queue, exchange, 'a.*', {}, (unbound) => {
          if (unbound) return done(unbound);
          channel.publish(exchange, 'a.b', Buffer.from('routed'), {}, (nacked) => {
            if (nacked) return done(nacked);
            channel.get(queue, { noAck: true }, (ungot, message) => {
              if (ungot) return done(ungot);
              assert.equal(message.content.toString(), 'routed');
              assert.equal(message.fields.exchange, exchange);
              connection.close(done);
            });
          });
        });
      });
    });
  });
});

test('a channel error reaches the callback and the event', (t, done) => {
  amqplib.connect(url, (refused, connection) => {
    if (refused) return done(refused);
    connection.createChannel((error, channel) => {
      if (error) return done(error);
      let answered = false;
      channel.on('error', ({ code }) => {
        assert.equal(code, 404);
        assert.ok(answered, 'the callback comes first');
        connection.close(done);
      });
      channel.checkQueue(fresh('missing'), (missing) => {
        assert.match(missing.message, /NOT_FOUND/);
        answered = true;
      });
    });
  });
});
