// Runs all programs of a grid, one after the other. Included behind a kernel, whose name is KERNEL.
#pragma once

using Body = std::function<void()>;
static const Body* running;

static void enter() {
    (*running)();
    threads[threadIdx.x].done = true;
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}

static void run_program(const Body& body) {
    running = &body;
    for (int number = 0; number < THREADS; ++number) {
        Thread& thread = threads[number];
        thread.stack.resize(256 << 10);
        thread.done = false;
        thread.batches.assign(1, {});
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
    }
    everyone.expected = THREADS;
    for (Meeting& warp : warps) warp.expected = 32;
    for (int left = THREADS; left > 0;) {
        left = 0;
        for (int number = 0; number < THREADS; ++number) {
            if (threads[number].done) continue;
            threadIdx = {number, 0, 0};
            swapcontext(&scheduler, &threads[number].context);
            left += !threads[number].done;
        }
    }
}

template <class... Arguments, size_t... Places>
void run_grid(void (*kernel)(Arguments...), void** given, const int* grid, std::index_sequence<Places...>) {
    for (int z = 0; z < grid[2]; ++z)
        for (int y = 0; y < grid[1]; ++y)
            for (int x = 0; x < grid[0]; ++x) {
                blockIdx = {x, y, z};
                run_program([&] { kernel(*static_cast<Arguments*>(given[Places])...); });
            }
}

template <class... Arguments>
void run_grid(void (*kernel)(Arguments...), void** given, const int* grid) {
    run_grid(kernel, given, grid, std::index_sequence_for<Arguments...>{});
}

// As the driver's cuLaunchKernel: `given` points to each argument.
extern "C" void launch(void** given, const int* grid, bool late) {
    copies_come_late = late;
    run_grid(KERNEL, given, grid);
}
