// What every script here starts from: the broker's address, fresh names, waits with a deadline.
// Run by test_amqplib.py with LEVERET_TEST_AMQP_URL set and amqplib on NODE_PATH.

const { randomUUID } = require('node:crypto');
const amqplib = require('amqplib');

const url = process.env.LEVERET_TEST_AMQP_URL;
const DEADLINE_MS = 10_000;

// No other test or run uses these names; what is declared under them expires by itself.
const fresh = (name) => `node-${randomUUID()}.${name}`;
const transient = { durable: false, expires: 60_000 };

// A connection that is closed when the test ends, however it ends.
async function connect(t, address = url) {
  const connection = await amqplib.connect(address);
  let isOpen = true;
  connection.on('close', () => { isOpen = false; });
  // Without a listener an 'error' event would end the process; tests listen for it themselves.
  connection.on('error', () => {});
  t.after(() => isOpen ? connection.close() : undefined);
  return connection;
}

// A channel on a connection of its own.
async function openChannel(t) {
  const channel = await (await connect(t)).createChannel();
  channel.on('error', () => {});
  return channel;
}

async function openConfirmChannel(t) {
  const channel = await (await connect(t)).createConfirmChannel();
  channel.on('error', () => {});
  return channel;
}

// The next such event's argument; rejects once the deadline has passed. Node's own `once`
// would not do: waiting for 'close', it fails on the 'error' that comes before.
function next(emitter, event) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no '${event}' came`)), DEADLINE_MS);
    emitter.once(event, (value) => {
      clearTimeout(timer);
      resolve(value);
    });
  });
}

// An inbox: hand `push` to consume(), await `take()` for one message after the other.
function inbox() {
  const waiting = [];
  const readers = [];
  return {
    push(message) {
      const reader = readers.shift();
      if (reader) reader(message);
      else waiting.push(message);
    },
    take() {
      if (waiting.length > 0) return Promise.resolve(waiting.shift());
      return new Promise((resolve, reject) => {
        const timer = setTimeout(() => reject(new Error('no message came')), DEADLINE_MS);
        readers.push((message) => {
          clearTimeout(timer);
          resolve(message);
        });
      });
    },
    get size() {
      return waiting.length;
    },
  };
}

module.exports = { connect, fresh, inbox, next, openChannel, openConfirmChannel, transient, url };
