/* Writing a rank's ring (plait/core/record/ring.py), and seeing collectives through, without the interpreter.

Between two matrix products of a step nothing of Python is left in the processor's caches. A record written in
Python takes 2 us in a loop and 30 us there; written here it takes 3 us there. Nothing is decided in this file that
Python does not say: when things are recorded is in plait/train/comm/log.py and flight.py, what a record means in
plait/core/record/ring.py. The types are described for Python, and their use for people, in _ring.pyi.

The interpreter's lock is the only lock: no method gives it away between reading and changing a list, except where a
collective's own methods are called, and there everything is looked at again. */

#define PY_SSIZE_T_CLEAN
#include <Python.h> /* of it the stable part alone (Py_LIMITED_API, hatch_build.py): one build serves every Python */
#include <stddef.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define FIRST 4096 /* the first record's place; plait.core.record.ring.HEADER */
#define SHOWN 16   /* collectives under way that a look sees to at once */
#define hold(one) Py_NewRef((PyObject *)(one))

typedef struct {
    uint32_t opened;
    uint8_t kind, call;
    uint16_t group;
    int64_t enqueued, started, ended, bytes;
    int32_t step;
    uint32_t sequence, name;
    int32_t peer;
    uint32_t signature, closed;
} Record; /* plait.core.record.ring.RECORD */

_Static_assert(sizeof(Record) == 64, "a record has 64 bytes");

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int64_t capacity, count;
    struct Flight *flying; /* whose end is looked for, oldest first; each is held */
} Writer;

typedef struct {
    PyObject_HEAD
    long long taken;
} Pace;

typedef struct {
    PyObject_HEAD
    Writer *ring;
    int group;
    uint32_t sequence;
    struct Flight *first, *last; /* each is held */
} Line;

typedef struct Flight {
    PyObject_HEAD
    Line *line;
    Pace *pace;
    PyObject *work;
    long long number, enqueued, started, looked; /* started: 0 as long as others of its line are before it */
    char in_line, in_flying;
    struct Flight *after, *next; /* in the line; in what is looked for */
} Flight;

static PyTypeObject *WriterType, *PaceType, *LineType, *FlightType;
static PyObject *is_completed, *wait_, *get_future;

/* Of a type that is made at run time each object holds one. */
static void free_object(void *object) {
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int64_t now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at); /* as time.monotonic_ns */
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

/* ---- records ---- */

static Record *place_of(Writer *ring, int64_t number) {
    return (Record *)((char *)ring->memory.buf + FIRST) + ((number - 1) & (ring->capacity - 1));
}

/* Whether it has memory to write to; with an exception if not. */
static int whole(Writer *ring) {
    if (!ring->capacity)
        PyErr_SetString(PyExc_RuntimeError, "this ring was never made");
    return ring->capacity > 0;
}

/* A new record. What stood in its place is damaged first, and the new one is whole last, so that nobody takes one for
the other. */
static int64_t put(Writer *ring, Record record) {
    int64_t number = __atomic_add_fetch(&ring->count, 1, __ATOMIC_RELAXED);
    Record *place = place_of(ring, number);
    uint32_t word = (uint32_t)number;
    __atomic_store_n(&place->closed, ~word, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)place + 4, (char *)&record + 4, sizeof(Record) - 8);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&place->opened, word, __ATOMIC_RELAXED);
    __atomic_store_n(&place->closed, word, __ATOMIC_RELEASE);
    return number;
}

/* Fill in a time or a size, unless the ring has gone round since. */
static void fill(Writer *ring, int64_t number, size_t field, int64_t value) {
    Record *place = place_of(ring, number);
    if (number > 0 && place->opened == (uint32_t)number)
        __atomic_store_n((int64_t *)((char *)place + field), value, __ATOMIC_RELEASE);
}

/* ---- collectives ---- */

static void begin_flight(Flight *flight, int64_t at) {
    flight->started = at;
    fill(flight->line->ring, flight->number, offsetof(Record, started), at);
}

static void forget(Flight *flight) {
    if (!flight->in_flying)
        return;
    Flight **link = &flight->line->ring->flying;
    while (*link != flight)
        link = &(*link)->next;
    *link = flight->next;
    flight->next = NULL;
    flight->in_flying = 0;
    Py_DECREF(flight);
}

static int64_t later(int64_t one, int64_t other) { return one > other ? one : other; }

/* It is over: said once; whoever says it later is not heard. Whether it was said now. One that ends before others of
its line are seen to end began at most as long ago as it took when it was last watched; never before it was enqueued. */
static int leave(Flight *flight, int64_t at, int failed) {
    if (!flight->in_line)
        return 0;
    Line *line = flight->line;
    Flight *before = NULL;
    at = later(at, later(flight->started, flight->enqueued)); /* others may have read the clock since */
    if (!flight->started)
        begin_flight(flight, flight->pace->taken ? later(at - flight->pace->taken, flight->enqueued) : flight->enqueued);
    fill(line->ring, flight->number, offsetof(Record, ended), failed ? -at : at);
    if (line->first == flight)
        line->first = flight->after;
    else {
        for (before = line->first; before->after != flight; before = before->after)
            ;
        before->after = flight->after;
    }
    if (line->last == flight)
        line->last = before;
    if (!before && line->first) /* a group serves one at a time */
        begin_flight(line->first, later(at, line->first->enqueued));
    flight->after = NULL;
    flight->in_line = 0;
    forget(flight);
    Py_DECREF(flight); /* the caller has another one */
    return 1;
}

/* When one that has ended since it was looked for did so: after as long as it took when it was last watched, as far as
that fits. */
static int64_t likely_end(Flight *flight, int64_t at) {
    int64_t likely = flight->started ? later(flight->started + flight->pace->taken, flight->looked) : at;
    return likely < at ? likely : at;
}

/* Whether its end has come; -1 with an exception. */
static int completed(Flight *flight) {
    PyObject *work = hold(flight->work); /* which it may be parted from meanwhile */
    PyObject *found = PyObject_CallMethodObjArgs(work, is_completed, NULL);
    Py_DECREF(work);
    int over = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return over;
}

/* A group serves one at a time. So one that is over tells that those before it may be, whose end nobody has looked for
since; with that, it is known when it began itself. One whose state cannot be told says so when it is waited for. */
static void end_before(Flight *flight, int64_t at) {
    while (flight->in_line && flight->line->first != flight && flight->line->first->in_flying) {
        Flight *one = (Flight *)hold(flight->line->first);
        int over = completed(one);
        if (over > 0)
            leave(one, likely_end(one, at), 0);
        else if (over < 0)
            PyErr_Clear();
        Py_DECREF(one);
        if (over <= 0)
            break;
    }
}

static void end_between(Flight *flight, int64_t at) {
    end_before(flight, at);
    leave(flight, likely_end(flight, at), 0);
}

/* It was seen to end. How long it took is known if it was seen to begin. */
static void end_now(Flight *flight, int64_t at, int failed) {
    end_before(flight, at);
    int64_t began = flight->started;
    if (leave(flight, at, failed) && !failed && began)
        flight->pace->taken = later(1, at - began);
}

static int look_at(Flight *flight) {
    int64_t before = now();
    int over = completed(flight);
    if (over > 0 && flight->in_flying)
        end_between(flight, now());
    else if (over == 0)
        flight->looked = before;
    return over < 0 ? -1 : 0;
}

/* Of all that are under way. Others may end them meanwhile, so each is held. */
static int look(Writer *ring) {
    Flight *found[SHOWN];
    int count = 0, result = 0;
    for (Flight *one = ring->flying; one && count < SHOWN; one = one->next)
        found[count++] = (Flight *)hold(one);
    for (int i = 0; i < count; i++) {
        if (!result && found[i]->in_flying)
            result = look_at(found[i]);
        Py_DECREF(found[i]);
    }
    return result;
}

/* ---- Flight ---- */

static PyObject *flight_fly(Flight *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "fly(work, looked_for)");
    int looked_for = PyObject_IsTrue(args[1]);
    if (looked_for < 0)
        return NULL;
    PyObject *before = self->work;
    self->work = hold(args[0]);
    Py_XDECREF(before);
    if (looked_for && self->in_line && !self->in_flying) {
        Flight **end = &self->line->ring->flying;
        while (*end)
            end = &(*end)->next;
        *end = (Flight *)hold(self);
        self->in_flying = 1;
    }
    Py_RETURN_NONE;
}

static PyObject *flight_land(Flight *self, PyObject *const *args, Py_ssize_t count) {
    int64_t at = count == 2 ? PyLong_AsLongLong(args[0]) : -1;
    int failed = count == 2 ? PyObject_IsTrue(args[1]) : -1;
    if (failed < 0 || (at == -1 && PyErr_Occurred()))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "land(at, failed)");
    end_now(self, at, failed);
    Py_RETURN_NONE;
}

static PyObject *flight_fail(Flight *self, PyObject *Py_UNUSED(none)) {
    leave(self, now(), 1);
    Py_RETURN_NONE;
}

static PyObject *call_work(Flight *self, PyObject *name) {
    if (!self->work)
        return PyErr_Format(PyExc_RuntimeError, "it has not been given to a wire");
    PyObject *work = hold(self->work); /* which it may be parted from meanwhile */
    PyObject *found = PyObject_CallMethodObjArgs(work, name, NULL);
    Py_DECREF(work);
    return found;
}

static PyObject *flight_wait(Flight *self, PyObject *Py_UNUSED(none)) {
    int over = self->in_flying ? completed(self) : 0;
    PyObject *found = over < 0 ? NULL : call_work(self, wait_);
    int64_t at = now();
    if (!found) {
        leave(self, at, 1);
        fill(self->line->ring, self->number, offsetof(Record, ended), -at); /* also if its end was seen before */
        return NULL;
    }
    Py_DECREF(found);
    if (over)
        end_between(self, at);
    else
        end_now(self, at, 0);
    Py_RETURN_NONE;
}

static PyObject *flight_is_completed(Flight *self, PyObject *Py_UNUSED(none)) { return call_work(self, is_completed); }

static PyObject *flight_get_future(Flight *self, PyObject *Py_UNUSED(none)) { return call_work(self, get_future); }

static void flight_dealloc(Flight *self) {
    Py_CLEAR(self->work);
    Py_CLEAR(self->pace);
    Py_CLEAR(self->line);
    free_object(self);
}

static PyMethodDef flight_methods[] = {
    {"fly", (PyCFunction)(void (*)(void))flight_fly, METH_FASTCALL, NULL},
    {"land", (PyCFunction)(void (*)(void))flight_land, METH_FASTCALL, NULL},
    {"fail", (PyCFunction)flight_fail, METH_NOARGS, NULL},
    {"wait", (PyCFunction)flight_wait, METH_NOARGS, NULL},
    {"is_completed", (PyCFunction)flight_is_completed, METH_NOARGS, NULL},
    {"get_future", (PyCFunction)flight_get_future, METH_NOARGS, NULL},
    {NULL},
};
static PyMemberDef flight_members[] = {
    {"work", T_OBJECT, offsetof(Flight, work), READONLY, NULL},
    {"number", T_LONGLONG, offsetof(Flight, number), READONLY, NULL},
    {"enqueued", T_LONGLONG, offsetof(Flight, enqueued), READONLY, NULL},
    {"looked", T_LONGLONG, offsetof(Flight, looked), READONLY, NULL},
    {NULL},
};

/* ---- Line ---- */

static PyObject *line_depart(Line *self, PyObject *const *args, Py_ssize_t count) {
    long long given[5];
    if (!self->ring)
        return PyErr_Format(PyExc_RuntimeError, "this line was never made");
    if (count != 6 || !PyObject_TypeCheck(args[0], PaceType))
        return PyErr_Format(PyExc_TypeError, "depart(pace, step, name, size, call, signature)");
    for (int i = 0; i < 5; i++)
        given[i] = PyLong_AsLongLong(args[i + 1]);
    if (PyErr_Occurred())
        return NULL;
    Flight *flight = PyObject_New(Flight, FlightType);
    if (!flight)
        return NULL;
    int64_t at = now(), started = self->first ? 0 : at;
    flight->line = (Line *)hold(self);
    flight->pace = (Pace *)hold(args[0]);
    flight->work = NULL;
    flight->enqueued = flight->looked = at;
    flight->started = started;
    flight->in_flying = 0;
    flight->after = flight->next = NULL;
    flight->number = put(self->ring, (Record){
        .kind = 5, /* Kind.COLLECTIVE */
        .call = (uint8_t)given[3], .group = (uint16_t)self->group, .enqueued = at, .started = started,
        .bytes = given[2], .step = (int32_t)given[0], .sequence = self->sequence++, .name = (uint32_t)given[1],
        .peer = -1, .signature = (uint32_t)given[4],
    });
    if (self->last)
        self->last->after = flight;
    else
        self->first = flight;
    self->last = (Flight *)hold(flight);
    flight->in_line = 1;
    return (PyObject *)flight;
}

static int line_init(Line *self, PyObject *args, PyObject *named) {
    PyObject *ring;
    int group;
    if (!PyArg_ParseTuple(args, "O!i", WriterType, &ring, &group) || !whole((Writer *)ring))
        return -1;
    if (self->ring) { /* whose list its flights are in */
        PyErr_SetString(PyExc_RuntimeError, "this line was made before");
        return -1;
    }
    self->ring = (Writer *)hold(ring);
    self->group = group;
    return 0;
}

static void line_dealloc(Line *self) { /* nobody is in line: each there holds it */
    Py_CLEAR(self->ring);
    free_object(self);
}

static PyMethodDef line_methods[] = {
    {"depart", (PyCFunction)(void (*)(void))line_depart, METH_FASTCALL, NULL},
    {NULL},
};

/* ---- Writer ---- */

/* Numbers given by place or by name. needed: how many must be given by place. */
static int numbers(PyObject *const *args, Py_ssize_t count, PyObject *named, const char *const *names, Py_ssize_t needed,
                   Py_ssize_t most, long long *given) {
    Py_ssize_t at;
    if (count < needed || count > most) {
        PyErr_Format(PyExc_TypeError, "takes %zd to %zd numbers, not %zd", needed, most, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        given[i] = PyLong_AsLongLong(args[i]);
    for (Py_ssize_t i = 0; named && i < PyTuple_Size(named); i++) {
        PyObject *name = PyTuple_GetItem(named, i);
        for (at = count; at < most && PyUnicode_CompareWithASCIIString(name, names[at]) != 0; at++)
            ;
        if (at == most) {
            PyErr_Format(PyExc_TypeError, "takes no %R, or has it already", name);
            return -1;
        }
        given[at] = PyLong_AsLongLong(args[count + i]);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *writer_begin(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    static const char *const names[] = {"kind", "name", "step", "enqueued", "started", "ended", "size", "group",
                                        "sequence", "peer", "call", "signature"};
    long long given[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0};
    if (!whole(self) || numbers(args, count, named, names, 3, 12, given) < 0)
        return NULL;
    if (!given[3])
        given[3] = now();
    return PyLong_FromLongLong(put(self, (Record){
        .kind = (uint8_t)given[0], .name = (uint32_t)given[1], .step = (int32_t)given[2], .enqueued = given[3],
        .started = given[4], .ended = given[5], .bytes = given[6], .group = (uint16_t)given[7],
        .sequence = (uint32_t)given[8], .peer = (int32_t)given[9], .call = (uint8_t)given[10],
        .signature = (uint32_t)given[11],
    }));
}

static PyObject *writer_enter(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    static const char *const names[] = {"kind", "name", "step", "size"};
    long long given[4] = {0, 0, 0, 0};
    if (!whole(self) || numbers(args, count, named, names, 3, 4, given) < 0)
        return NULL;
    int64_t at = now();
    return PyLong_FromLongLong(put(self, (Record){
        .kind = (uint8_t)given[0], .name = (uint32_t)given[1], .step = (int32_t)given[2], .enqueued = at,
        .started = at, .bytes = given[3], .peer = -1,
    }));
}

static PyObject *filled(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named, size_t field) {
    static const char *const names[] = {"number", "at", "failed"};
    long long given[3] = {0, 0, 0};
    if (!whole(self) || numbers(args, count, named, names, 1, field == offsetof(Record, ended) ? 3 : 2, given) < 0)
        return NULL;
    if (!given[1] && field != offsetof(Record, bytes))
        given[1] = now();
    fill(self, given[0], field, given[2] ? -given[1] : given[1]);
    Py_RETURN_NONE;
}

static PyObject *writer_start(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    return filled(self, args, count, named, offsetof(Record, started));
}

static PyObject *writer_end(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    return filled(self, args, count, named, offsetof(Record, ended));
}

static PyObject *writer_size(Writer *self, PyObject *const *args, Py_ssize_t count, PyObject *named) {
    return filled(self, args, count, named, offsetof(Record, bytes));
}

static PyObject *writer_look(Writer *self, PyObject *Py_UNUSED(none)) {
    if (look(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *writer_flying(Writer *self, void *Py_UNUSED(closure)) {
    PyObject *found = PyList_New(0);
    for (Flight *one = self->flying; found && one; one = one->next)
        if (PyList_Append(found, (PyObject *)one) < 0)
            Py_CLEAR(found);
    return found;
}

/* One of the things that run() does. */
static int act(Writer *self, PyObject *entry, PyObject *of, long step) {
    if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 3) {
        PyErr_SetString(PyExc_TypeError, "each act is (callable, kind, name)");
        return -1;
    }
    long kind = PyLong_AsLong(PyTuple_GetItem(entry, 1)), name = PyLong_AsLong(PyTuple_GetItem(entry, 2));
    if (PyErr_Occurred())
        return -1;
    int64_t number = 0;
    if (kind) {
        int64_t at = now();
        number = put(self, (Record){
            .kind = (uint8_t)kind, .enqueued = at, .started = at, .step = (int32_t)step, .name = (uint32_t)name,
            .peer = -1,
        });
    }
    PyObject *done = PyObject_CallFunctionObjArgs(PyTuple_GetItem(entry, 0), of, NULL);
    if (!done)
        return -1;
    Py_DECREF(done);
    if (kind) {
        fill(self, number, offsetof(Record, ended), now());
        if (self->flying)
            return look(self);
    }
    return 0;
}

static PyObject *writer_run(Writer *self, PyObject *const *args, Py_ssize_t count) {
    if (!whole(self))
        return NULL;
    if (count != 3 || !PyTuple_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "run(acts, of, step), with a tuple of acts");
    long step = PyLong_AsLong(args[2]);
    if (step == -1 && PyErr_Occurred())
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); i++)
        if (act(self, PyTuple_GetItem(args[0], i), args[1], step) < 0)
            return NULL;
    Py_RETURN_NONE;
}

static int writer_init(Writer *self, PyObject *args, PyObject *named) {
    PyObject *memory;
    long long capacity;
    if (!PyArg_ParseTuple(args, "OL", &memory, &capacity))
        return -1;
    if (self->memory.obj) {
        PyErr_SetString(PyExc_RuntimeError, "this ring was made before");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (capacity < 1 || capacity & (capacity - 1) || self->memory.len < FIRST ||
        (self->memory.len - FIRST) % (Py_ssize_t)sizeof(Record) ||
        (self->memory.len - FIRST) / (Py_ssize_t)sizeof(Record) != capacity) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the capacity is not a power of two, or does not fit the memory");
        return -1;
    }
    self->capacity = capacity;
    return 0;
}

static void writer_dealloc(Writer *self) {
    PyBuffer_Release(&self->memory);
    free_object(self);
}

static PyMethodDef writer_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))writer_begin, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"enter", (PyCFunction)(void (*)(void))writer_enter, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"start", (PyCFunction)(void (*)(void))writer_start, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"end", (PyCFunction)(void (*)(void))writer_end, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"size", (PyCFunction)(void (*)(void))writer_size, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"run", (PyCFunction)(void (*)(void))writer_run, METH_FASTCALL, NULL},
    {"look", (PyCFunction)writer_look, METH_NOARGS, NULL},
    {NULL},
};
static PyGetSetDef writer_getset[] = {{"flying", (getter)writer_flying, NULL, NULL, NULL}, {NULL}};
static PyMemberDef pace_members[] = {{"taken", T_LONGLONG, offsetof(Pace, taken), 0, NULL}, {NULL}};

static void pace_dealloc(Pace *self) { free_object(self); }

static PyType_Spec writer_spec = {
    "plait.core.record._ring.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    (PyType_Slot[]){{Py_tp_new, PyType_GenericNew}, {Py_tp_init, writer_init}, {Py_tp_dealloc, writer_dealloc},
                    {Py_tp_methods, writer_methods}, {Py_tp_getset, writer_getset}, {0, NULL}},
};
static PyType_Spec pace_spec = {
    "plait.core.record._ring.Pace", sizeof(Pace), 0, Py_TPFLAGS_DEFAULT,
    (PyType_Slot[]){{Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, pace_dealloc}, {Py_tp_members, pace_members},
                    {0, NULL}},
};
static PyType_Spec line_spec = {
    "plait.core.record._ring.Line", sizeof(Line), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    (PyType_Slot[]){{Py_tp_new, PyType_GenericNew}, {Py_tp_init, line_init}, {Py_tp_dealloc, line_dealloc},
                    {Py_tp_methods, line_methods}, {0, NULL}},
};
static PyType_Spec flight_spec = { /* made by a line alone */
    "plait.core.record._ring.Flight", sizeof(Flight), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    (PyType_Slot[]){{Py_tp_dealloc, flight_dealloc}, {Py_tp_methods, flight_methods},
                    {Py_tp_members, flight_members}, {0, NULL}},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ring", NULL, -1, NULL};

static int add_type(PyObject *made, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddType(made, *type) : -1;
}

PyMODINIT_FUNC PyInit__ring(void) {
    PyObject *made = PyModule_Create(&module);
    is_completed = PyUnicode_InternFromString("is_completed");
    wait_ = PyUnicode_InternFromString("wait");
    get_future = PyUnicode_InternFromString("get_future");
    if (!made || !is_completed || !wait_ || !get_future || add_type(made, &writer_spec, &WriterType) < 0 ||
        add_type(made, &pace_spec, &PaceType) < 0 || add_type(made, &line_spec, &LineType) < 0 ||
        add_type(made, &flight_spec, &FlightType) < 0)
        return NULL;
    return made;
}
