/* A disk that can lose power or fill up, for one process: LD_PRELOAD=disk.so.
 *
 * LEVERET_TEST_DISK names a folder. What the process writes goes to its files as always; the
 * shadow, a second folder, gets of each file only what was synced. What was written since is
 * noted as ranges (offset, length) in a file beside the shadow's, called *.notes:
 *
 *   LEVERET_TEST_DISK     the folder that is watched, with a trailing slash
 *   LEVERET_TEST_SHADOW   the shadow: must equal the folder when the process starts
 *   LEVERET_TEST_SYNC_US  how much longer a sync takes, in microseconds
 *   LEVERET_TEST_FAULT    a file; while it exists, writes in the folder fail with the error
 *                         number it holds, and every second one first writes a part; each
 *                         adds a byte to the file of that name with .met at its end
 *
 * -shm files of SQLite are memory, not disk, and left alone. A synced file is taken to be in its
 * folder, as on ext4; a deleted one is back until its folder was synced. Renames are not
 * followed: nothing that is watched renames.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 64

struct range { uint64_t at, size; };

struct file {
    dev_t device;
    ino_t inode;
    int is_new;                 /* it took the place of another one of its name */
    int is_deleted;             /* and its folder was not synced since */
    int shadow, notes;          /* descriptors; -1 until needed */
    char name[PATH_MAX];        /* within the folder */
    struct range *dirty;
    size_t count, room;
};

static struct file files[FILES];
static size_t file_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *folder, *shadow, *fault;
static unsigned faults;
static useconds_t sync_us;

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);
static int (*real_ftruncate)(int, off_t);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_unlink)(const char *);

__attribute__((constructor)) static void begin(void)
{
    real_write = dlsym(RTLD_NEXT, "write");
    real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    real_writev = dlsym(RTLD_NEXT, "writev");
    real_pwritev = dlsym(RTLD_NEXT, "pwritev64");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    folder = getenv("LEVERET_TEST_DISK");
    shadow = getenv("LEVERET_TEST_SHADOW");
    fault = getenv("LEVERET_TEST_FAULT");
    const char *text = getenv("LEVERET_TEST_SYNC_US");
    sync_us = text ? (useconds_t)atoi(text) : 0;
}

static void die(const char *what)
{
    /* A test that goes on after this would prove nothing. */
    dprintf(2, "disk.c: %s: %s\n", what, strerror(errno));
    abort();
}

/* The file's name if it is in the watched folder. */
static int is_watched(int fd, char *name)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    size_t start = strlen(folder);
    if (size <= 0)
        return 0;
    path[size] = 0;
    if (strncmp(path, folder, start) || (size > 4 && !strcmp(path + size - 4, "-shm")))
        return 0;
    strcpy(name, path + start);
    return 1;
}

/* Call with the lock held. */
static struct file *find(int fd)
{
    struct stat status;
    char name[PATH_MAX];
    if (!folder || fstat(fd, &status) || !S_ISREG(status.st_mode))
        return NULL;
    for (size_t i = 0; i < file_count; i++)
        if (files[i].inode == status.st_ino && files[i].device == status.st_dev)
            return &files[i];
    if (!is_watched(fd, name))
        return NULL;
    struct file *file = NULL;
    for (size_t i = 0; i < file_count; i++)
        if (!strcmp(files[i].name, name))
            file = &files[i];
    if (file) {
        file->is_new = 1;
        file->is_deleted = 0;
        file->count = 0;
    } else {
        if (file_count == FILES)
            die("too many files");
        file = &files[file_count++];
        strcpy(file->name, name);
        file->shadow = file->notes = -1;
    }
    file->device = status.st_dev;
    file->inode = status.st_ino;
    return file;
}

static int open_shadow(const struct file *file, const char *suffix)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s%s", shadow, file->name, suffix) >= (int)sizeof path)
        die("path too long");
    for (char *at = path + strlen(shadow) + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(path, 0755);
        *at = '/';
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        die(path);
    return fd;
}

/* Before the write: whatever a crash makes of it, the notes cover it. */
static void note(struct file *file, uint64_t at, uint64_t size)
{
    if (!shadow || !size)
        return;
    if (file->count == file->room) {
        file->room = file->room ? 2 * file->room : 256;
        file->dirty = realloc(file->dirty, file->room * sizeof *file->dirty);
        if (!file->dirty)
            die("no memory");
    }
    if (file->notes < 0)
        file->notes = open_shadow(file, ".notes");
    struct range range = {at, size};
    file->dirty[file->count] = range;
    off_t where = (off_t)(file->count++ * sizeof range);
    if (real_pwrite(file->notes, &range, sizeof range, where) != sizeof range)
        die("notes");
}

static void copy(struct file *file, int fd, struct range range, uint64_t end)
{
    static char buffer[1 << 16];
    while (range.size && range.at < end) {
        size_t part = range.size < sizeof buffer ? range.size : sizeof buffer;
        ssize_t got = pread(fd, buffer, part, (off_t)range.at);
        if (got < 0)
            die("read");
        if (!got)
            return;
        if (real_pwrite(file->shadow, buffer, (size_t)got, (off_t)range.at) != got)
            die("shadow");
        range.at += (uint64_t)got;
        range.size -= (uint64_t)got;
    }
}

/* Call with the lock held, before the caller is told that its data are safe. */
static void carry_over(struct file *file, int fd)
{
    struct stat status;
    if (!shadow)
        return;
    if (file->shadow < 0)
        file->shadow = open_shadow(file, "");
    if (fstat(fd, &status))
        die("fstat");
    if (file->is_new && real_ftruncate(file->shadow, 0))
        die("shadow");
    file->is_new = 0;
    /* Opened for writing alone. Others must not be opened anew: to close them drops their locks. */
    int source = fd;
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        source = open(path, O_RDONLY | O_CLOEXEC);
    }
    for (size_t i = 0; i < file->count; i++)
        copy(file, source, file->dirty[i], (uint64_t)status.st_size);
    if (source != fd)
        close(source);
    if (real_ftruncate(file->shadow, status.st_size))
        die("shadow");
    file->count = 0;
    if (file->notes >= 0 && real_ftruncate(file->notes, 0))
        die("notes");
}

/* The error that is to be met with, or 0. Every second one lets a part through first. What met it is
   noted: databases are the store's, whose attempts a test can count; the rest is the event log's. */
static int fails(const struct file *file, int *partly)
{
    char text[16];
    if (!fault)
        return 0;
    int fd = open(fault, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    char met[PATH_MAX];
    snprintf(met, sizeof met, "%s.met", fault);
    fd = open(met, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0 || real_write(fd, strstr(file->name, ".db") ? "d" : "-", 1) != 1)
        die(met);
    close(fd);
    *partly = faults++ % 2;
    return atoi(text);
}

static ssize_t write_at(int fd, const void *data, size_t size, off_t at, int is_positioned)
{
    pthread_mutex_lock(&lock);
    struct file *file = find(fd);
    int partly = 0, error = file ? fails(file, &partly) : 0;
    ssize_t done;
    if (error) {
        if (!partly || size < 2) {
            pthread_mutex_unlock(&lock);
            errno = error;
            return -1;
        }
        size /= 2;
    }
    if (file) {
        struct stat status;
        off_t start = at;
        if (!is_positioned)
            start = fcntl(fd, F_GETFL) & O_APPEND && !fstat(fd, &status) ? status.st_size
                                                                        : lseek(fd, 0, SEEK_CUR);
        note(file, (uint64_t)start, size);
    }
    done = is_positioned ? real_pwrite(fd, data, size, at) : real_write(fd, data, size);
    int saved = errno;
    pthread_mutex_unlock(&lock);
    errno = saved;
    return done;
}

/* Most writes of a process are to sockets: they must not wait for each other. */
static int is_file(int fd)
{
    struct stat status;
    return folder && !fstat(fd, &status) && S_ISREG(status.st_mode);
}

ssize_t write(int fd, const void *data, size_t size)
{
    return is_file(fd) ? write_at(fd, data, size, 0, 0) : real_write(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return is_file(fd) ? write_at(fd, data, size, at, 1) : real_pwrite(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    return pwrite(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    ssize_t all = 0;
    if (!is_file(fd))
        return real_writev(fd, parts, count);
    for (int i = 0; i < count; i++) {
        ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (done < 0)
            return all ? all : -1;
        all += done;
        if ((size_t)done < parts[i].iov_len)
            break;
    }
    return all;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
    ssize_t all = 0;
    if (!is_file(fd))
        return real_pwritev(fd, parts, count, at);
    for (int i = 0; i < count; i++) {
        ssize_t done = pwrite(fd, parts[i].iov_base, parts[i].iov_len, at + all);
        if (done < 0)
            return all ? all : -1;
        all += done;
        if ((size_t)done < parts[i].iov_len)
            break;
    }
    return all;
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at)
{
    return pwritev(fd, parts, count, at);
}

int ftruncate(int fd, off_t size)
{
    struct stat status;
    pthread_mutex_lock(&lock);
    struct file *file = find(fd);
    int partly = 0, error = file ? fails(file, &partly) : 0, result = -1;
    if (!error) {
        if (file && !fstat(fd, &status)) {
            off_t low = size < status.st_size ? size : status.st_size;
            off_t high = size < status.st_size ? status.st_size : size;
            note(file, (uint64_t)low, (uint64_t)(high - low));
        }
        result = real_ftruncate(fd, size);
        error = errno;
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int ftruncate64(int fd, off64_t size)
{
    return ftruncate(fd, size);
}

/* A folder was synced: what was deleted in it stays deleted. Call with the lock held. */
static void bury(int fd)
{
    char link[64], path[PATH_MAX], name[2 * PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return;
    path[size] = 0;
    for (size_t i = 0; i < file_count; i++) {
        struct file *file = &files[i];
        if (!file->is_deleted)
            continue;
        snprintf(name, sizeof name, "%s%s", folder, file->name);
        *strrchr(name, '/') = 0;
        if (strcmp(name, path))
            continue;
        const char *suffixes[] = {"", ".notes"};
        for (int j = 0; j < 2; j++) {
            snprintf(name, sizeof name, "%s/%s%s", shadow, file->name, suffixes[j]);
            real_unlink(name);
        }
        if (file->shadow >= 0)
            close(file->shadow);
        if (file->notes >= 0)
            close(file->notes);
        file->shadow = file->notes = -1;
        file->is_deleted = 0;
    }
}

static int sync_file(int fd, int (*real)(int))
{
    struct stat status;
    if (!folder || fstat(fd, &status) || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)))
        return real(fd);
    pthread_mutex_lock(&lock);
    struct file *met = find(fd);
    int partly = 0, error = met ? fails(met, &partly) : 0;
    pthread_mutex_unlock(&lock);
    if (error) {
        errno = error;
        return -1;
    }
    if (real(fd))
        return -1;
    if (sync_us)
        usleep(sync_us);
    /* Not before: all this time the power may go. */
    pthread_mutex_lock(&lock);
    struct file *file = find(fd);
    if (file)
        carry_over(file, fd);
    else if (S_ISDIR(status.st_mode) && shadow)
        bury(fd);
    pthread_mutex_unlock(&lock);
    return 0;
}

int fsync(int fd)
{
    return sync_file(fd, real_fsync);
}

int fdatasync(int fd)
{
    return sync_file(fd, real_fdatasync);
}

/* The disk's own copy stays until the folder is synced. The inode may soon be another file's. */
int unlink(const char *path)
{
    pthread_mutex_lock(&lock);
    struct stat status;
    if (folder && !lstat(path, &status))
        for (size_t i = 0; i < file_count; i++)
            if (files[i].inode == status.st_ino && files[i].device == status.st_dev)
                files[i].inode = 0, files[i].is_deleted = 1;
    pthread_mutex_unlock(&lock);
    return real_unlink(path);
}
