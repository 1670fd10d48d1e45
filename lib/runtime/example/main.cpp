// Loads a bundle, runs it on its reference inputs, from two threads on one session and on a session of its own, and
// compares the outputs with the reference. `run FOLDER [FOLDER...]` exits with 0 if all agree.
//
// `run --times FOLDER [FOLDER...]` tells how long it takes to load the first and to run it, what a further session of it
// costs, and how long it takes to load the others, as two lines of JSON.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>

#include "family_tuner_runtime.hpp"

using family_tuner::Model;
using tvm::ffi::Tensor;

namespace {

// Seconds since the libraries were loaded and main was about to begin.
const auto started = std::chrono::steady_clock::now();
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count(); }

// The largest difference, over the largest value of the reference.
double error(const Tensor& found, const Tensor& expected) {
  double difference = 0, largest = 0;
  DLDataType dtype = found.dtype();
  if (found.numel() != expected.numel() || dtype.bits != expected.dtype().bits) return INFINITY;
  if (dtype.code != kDLFloat || dtype.bits != 32) {
    return std::memcmp(found.data_ptr(), expected.data_ptr(), found.numel() * ((dtype.bits + 7) / 8)) ? INFINITY : 0;
  }
  const auto* one = static_cast<const float*>(found.data_ptr());
  const auto* other = static_cast<const float*>(expected.data_ptr());
  for (int64_t n = 0; n < found.numel(); ++n) {
    difference = std::fmax(difference, std::isnan(one[n]) ? INFINITY : std::fabs(double(one[n]) - other[n]));
    largest = std::fmax(largest, std::fabs(double(other[n])));
  }
  return largest ? difference / largest : difference;
}

double largest_error(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
  if (found.size() != expected.size()) return INFINITY;
  double largest = 0;
  for (size_t n = 0; n < found.size(); ++n) largest = std::fmax(largest, error(found[n], expected[n]));
  return largest;
}

bool agrees(const std::string& folder) {
  Model model(folder);
  auto [inputs, expected] = model.reference();
  if (inputs.empty()) throw family_tuner::Error(folder + " has no reference to compare with");
  double largest = largest_error(model(inputs), expected);

  // Two threads call one session, and a third a session of its own.
  Model other = model.session({1});
  std::vector<double> errors(3);
  std::vector<std::thread> callers;
  for (int n = 0; n < 3; ++n) {
    callers.emplace_back([&, n, inputs = inputs, expected = expected] {
      for (int turn = 0; turn < 3; ++turn) {
        errors[n] = std::fmax(errors[n], largest_error((n < 2 ? model : other)(inputs), expected));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (double each : errors) largest = std::fmax(largest, each);
  std::printf("%s: %zu inputs, %zu outputs, %d threads, largest error %.1e, allowed %.1e\n", folder.c_str(),
              model.inputs().size(), model.outputs().size(), model.threads(), largest, model.tolerance());
  return largest <= model.tolerance();
}

// Resident memory of this process that is no page of a file, in KiB.
long anonymous_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stol(line.substr(8));
  }
  return 0;
}

void times(const std::vector<std::string>& folders) {
  Model model(folders[0]);
  double loaded = seconds();
  auto [inputs, expected] = model.reference();
  model(inputs);
  std::printf("{\"load_s\": %.5f, \"first_s\": %.5f}\n", loaded, seconds());
  std::fflush(stdout);

  constexpr int kSessions = 20;
  long before = anonymous_kib();
  std::vector<Model> sessions;
  for (int n = 0; n < kSessions; ++n) sessions.push_back(model.session({1}));
  long made = anonymous_kib();
  for (Model& session : sessions) session(inputs);
  long used = anonymous_kib();

  double start = seconds();
  std::vector<Model> others;
  for (size_t n = 1; n < folders.size(); ++n) others.emplace_back(folders[n]);
  double all = seconds() - start;
  std::printf("{\"session_kib\": %.1f, \"used_session_kib\": %.1f, \"others\": %zu, \"others_s\": %.4f, "
              "\"others_kib\": %ld}\n",
              double(made - before) / kSessions, double(used - before) / kSessions, others.size(), all,
              anonymous_kib() - used);
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count > 2 && std::string(words[1]) == "--times") {
      times({words + 2, words + count});
      return 0;
    }
    bool agree = count > 1;
    for (int n = 1; n < count; ++n) agree = agrees(words[n]) && agree;
    return agree ? 0 : 1;
  } catch (const std::exception& problem) {
    std::cerr << problem.what() << std::endl;
    return 2;
  }
}
