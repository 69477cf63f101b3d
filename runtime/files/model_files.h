// The small files of a model: config.json, tokenizer.json, chat_template.jinja, ... They are those of a directory, or
// what a file in another format says, in their form.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

class ModelFiles {
  public:
    using Contents = std::map<std::string, std::function<std::string()>>;  // by name; made when they are read

    ModelFiles() = default;                   // no files
    ModelFiles(std::string model_directory);  // NOLINT: implicit on purpose. "": no files
    ModelFiles(std::string model_file, Contents contents);

    const std::string& path() const { return where; }  // of the directory, or of the file in another format
    bool has(const std::string& name) const;
    // Throws Error for one that is not there, or in a directory larger than limit, in bytes.
    std::string read(const std::string& name, int64_t limit = int64_t(1) << 30) const;
    // The name of a file in errors: "models/a/config.json", "a.gguf: config.json".
    std::string shown_as(const std::string& name) const;
    // Sorted, without directories; those in a subdirectory with its name in front.
    std::vector<std::string> names(const std::string& subdirectory = "") const;

  private:
    std::string where;
    Contents made;
    bool directory = true;
};
